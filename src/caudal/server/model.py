"""The model as the server sees it: a name, a tokenizer, a chat template and facts to show."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from caudal.tokenizer.chat_template import ChatTemplate
from caudal.tokenizer.gguf_tokenizer import Tokenizer


@dataclass(slots=True)
class ServedModel:
    """Everything about the served model that does not live in the engine."""

    name: str
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    architecture: str = ""
    quantization: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    _max_token_bytes: int = 0

    @property
    def warnings(self) -> list[str]:
        """What may make answers differ from the model's reference, for people to read."""
        error = self.chat_template.error
        return [*self.tokenizer.warnings, *([f"chat: {error}"] if error else [])]

    @property
    def max_token_bytes(self) -> int:
        """Bytes of the longest token; computed once, on the first very long prompt."""
        if not self._max_token_bytes:
            token_bytes = self.tokenizer.token_bytes
            lengths = (len(token_bytes(i)) for i in range(self.tokenizer.vocab_size))
            self._max_token_bytes = max(1, *lengths)
        return self._max_token_bytes
