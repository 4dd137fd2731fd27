"""Text to token ids and back, and chats to prompts."""

from __future__ import annotations

from caudal.tokenizer.chat_template import ChatTemplate
from caudal.tokenizer.detokenizer import DetokenizedDelta, IncrementalDetokenizer
from caudal.tokenizer.gguf_tokenizer import Tokenizer, TokenPiece
from caudal.tokenizer.rendered_prompt import PromptSegment, RenderedPrompt

__all__ = [
    "ChatTemplate",
    "DetokenizedDelta",
    "IncrementalDetokenizer",
    "PromptSegment",
    "RenderedPrompt",
    "TokenPiece",
    "Tokenizer",
]
