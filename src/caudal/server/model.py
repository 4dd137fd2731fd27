"""The model as the server sees it: a name, a tokenizer, a chat template and facts to show."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from caudal.sampling_params import Pooling
from caudal.server.dialect import Dialect
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
    pooling: Pooling = "mean"
    """How a vector is made of a text unless the client says."""
    num_parameters: int = 0
    num_bytes: int = 0
    """Of the weights in the file."""
    facts: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    """The file's metadata but for arrays and the chat template."""
    created: int = field(default_factory=lambda: int(time.time()))
    dialect: Dialect | None = None
    """How it writes calls and reasoning; None: not looked up yet."""
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
