"""The tokenizer of a model, built from the metadata of its GGUF file."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Self

from caudal.errors import InvalidRequestError, ModelFileError, UnsupportedModelError
from caudal.tokenizer.pretokenizers import find_pre_tokenizer
from caudal.tokenizer.rendered_prompt import RenderedPrompt
from caudal.tokenizer.special_tokens import SpecialTokenFinder
from caudal.tokenizer.text_encoders import (
    TextEncoder,
    create_byte_level_encoder,
    create_sentencepiece_encoder,
)
from caudal.weights.token_bytes import raw_token_bytes
from caudal.weights.token_vocabulary import (
    CONTROL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Vocabulary,
    read_vocabulary,
)

_logger = logging.getLogger(__name__)

_MODELS = ("gpt2", "llama")
"""Values of `tokenizer.ggml.model`: byte-level BPE and SentencePiece-style BPE."""


class TokenPiece(NamedTuple):
    """What one token stands for."""

    raw: bytes
    """Its bytes; of a special token its text in UTF-8."""
    text: str | None
    """`raw` decoded, None if a character is cut off at either end."""
    is_special: bool


class _Style(NamedTuple):
    """How a kind of vocabulary behaves around the text itself."""

    encoder: TextEncoder
    is_byte_level: bool
    add_bos: bool
    strips_leading_space: bool


class Tokenizer:
    """Text to token ids and back; immutable after construction and safe to share by threads."""

    def __init__(self, vocabulary: Vocabulary, style: _Style) -> None:
        self._tokens = vocabulary.tokens
        self._types: list[int] = vocabulary.types.tolist()
        self._encoder = style.encoder
        self._is_byte_level = style.is_byte_level
        self.add_bos = style.add_bos
        """Whether prompts start with BOS unless the caller decides otherwise."""
        self.strips_leading_space = style.strips_leading_space
        """Whether a text's first space is only the marker that encoding has put there."""
        self.vocab_size = len(vocabulary.tokens)
        self.bos_id = vocabulary.special.get("bos")
        self.eos_id = vocabulary.special.get("eos")
        self.named_special_ids: Mapping[str, int] = vocabulary.special
        """Special ids that the file names: bos, eos, eot, unknown, padding, …"""
        self.eog_ids = vocabulary.eog_ids
        self.special_ids = frozenset(vocabulary.ids_of_type(CONTROL, UNKNOWN, UNUSED))
        """Ids that decoding leaves out by default."""
        self.warnings = vocabulary.warnings
        """What about the file may degrade answers; meant to be shown to users."""
        control = vocabulary.ids_of_type(CONTROL, UNKNOWN)
        user_defined = vocabulary.ids_of_type(USER_DEFINED)
        self.control_texts = frozenset(self._tokens[index] for index in control)
        """Texts that only mean a token where special tokens are parsed."""
        self._find_user_defined = self._finder(user_defined)
        self._find_all = self._finder([*user_defined, *control])
        self._pieces: list[TokenPiece | None] = [None] * self.vocab_size

    @classmethod
    def from_gguf_metadata(cls, metadata: Mapping[str, object]) -> Self:
        """Build from `tokenizer.ggml.*` keys; arrays are NumPy arrays or lists.

        Logs and records in `warnings` whatever had to be guessed. Raises ModelFileError for
        missing or contradictory keys, UnsupportedModelError for another kind of vocabulary.
        """
        vocabulary = read_vocabulary(metadata)
        if vocabulary.model not in _MODELS:
            raise UnsupportedModelError(
                f"tokenizer.ggml.model {vocabulary.model[:60]!r} is not supported; known: "
                + ", ".join(_MODELS)
            )
        create = _byte_level_style if vocabulary.model == "gpt2" else _sentencepiece_style
        style = create(vocabulary)
        if style.add_bos and "bos" not in vocabulary.special:
            raise ModelFileError(
                "tokenizer.ggml.bos_token_id is missing, but the model's prompts start with it"
            )
        for warning in vocabulary.warnings:
            _logger.warning("%s", warning)
        return cls(vocabulary, style)

    def encode(
        self,
        text: str,
        *,
        add_bos: bool | None = None,
        parse_special: bool = False,
        param: str = "prompt",
    ) -> list[int]:
        """Ids of `text`.

        `add_bos` None means as the model wants it; a text that begins with the parsed BOS gets no
        second one. Control tokens written in the text count as such only with `parse_special`;
        user-defined tokens always do. Raises InvalidRequestError, naming `param`, for lone
        surrogates.
        """
        return self.encode_batch([text], add_bos=add_bos, parse_special=parse_special, param=param)[
            0
        ]

    def encode_batch(
        self,
        texts: Sequence[str],
        *,
        add_bos: bool | None = None,
        parse_special: bool = False,
        param: str = "prompt",
    ) -> list[list[int]]:
        """Ids of each text, in one native call; parameters as for `encode`."""
        finder = self._find_all if parse_special else self._find_user_defined
        cut = []
        for text in texts:
            require_encodable(text, param)
            cut.append(_cut(text, finder.find(text)))
        return self._encode_cut(cut, add_bos)

    def encode_prompt(self, rendered: RenderedPrompt, *, add_bos: bool | None = None) -> list[int]:
        """Ids of a rendered chat: special tokens of the template count, those of messages do not.

        A template that writes BOS itself gets no second one.
        """
        parts = _cut(rendered.text, self._find_all.find(rendered.masked_text()))
        if rendered.has_content:
            # Blotted-out text may hold user-defined tokens, which count everywhere.
            parts = [piece for part in parts for piece in self._cut_user_defined(part)]
        return self._encode_cut([parts], add_bos)[0]

    def decode(
        self, ids: Iterable[int], *, skip_special: bool = True, param: str = "tokens"
    ) -> str:
        """Text of `ids`; bytes that form no character become U+FFFD.

        Raises InvalidRequestError, naming `param`, for an id outside the vocabulary.
        """
        pieces = [self._checked_piece(token_id, param) for token_id in ids]
        raw = b"".join(p.raw for p in pieces if not (skip_special and p.is_special))
        text = raw.decode("utf-8", "replace")
        return text[1:] if self.strips_leading_space and text.startswith(" ") else text

    def token_bytes(self, token_id: int) -> bytes:
        """Raw bytes of a token, of a special token its text. `token_id` must be in range."""
        return self.piece(token_id).raw

    def token_text(self, token_id: int) -> str:
        """A token's bytes as text, U+FFFD where they are no whole character."""
        piece = self.piece(token_id)
        return piece.raw.decode("utf-8", "replace") if piece.text is None else piece.text

    def piece(self, token_id: int) -> TokenPiece:
        """Bytes and text of a token, made once; IndexError outside the vocabulary."""
        piece = self._pieces[token_id]
        if piece is None:
            piece = self._pieces[token_id] = self._make_piece(token_id)
        return piece

    def _cut_user_defined(self, part: str | int) -> list[str | int]:
        if isinstance(part, int):
            return [part]
        return _cut(part, self._find_user_defined.find(part))

    def _checked_piece(self, token_id: int, param: str) -> TokenPiece:
        if not 0 <= token_id < self.vocab_size:
            raise InvalidRequestError(
                f"{param}: token id {token_id} is outside the vocabulary (0 to "
                f"{self.vocab_size - 1})",
                param=param,
            )
        return self.piece(token_id)

    def _make_piece(self, token_id: int) -> TokenPiece:
        raw = raw_token_bytes(
            self._tokens[token_id], self._types[token_id], is_byte_level=self._is_byte_level
        )
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            text = None
        return TokenPiece(raw, text, token_id in self.special_ids)

    def _finder(self, ids: Iterable[int]) -> SpecialTokenFinder:
        return SpecialTokenFinder({self._tokens[index]: index for index in ids})

    def _encode_cut(
        self, cut: Sequence[Sequence[str | int]], add_bos: bool | None
    ) -> list[list[int]]:
        texts = [part for parts in cut for part in parts if isinstance(part, str)]
        encoded = iter(self._encoder.encode_batch(texts) if texts else ())
        bos = self.bos_id if (self.add_bos if add_bos is None else add_bos) else None
        result = []
        for parts in cut:
            ids: list[int] = [] if bos is None or parts[:1] == [bos] else [bos]
            for part in parts:
                if isinstance(part, int):
                    ids.append(part)
                else:
                    ids += next(encoded)
            result.append(ids)
        return result


def require_encodable(text: str, param: str) -> None:
    """Raise InvalidRequestError, naming `param`, if `text` has a lone surrogate."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{param}: character {error.start} is a lone surrogate "
            f"(\\u{ord(text[error.start]):04x}), which is not valid Unicode text",
            param=param,
        ) from None


def _cut(text: str, spans: Iterable[tuple[int, int, int]]) -> list[str | int]:
    """`text` as plain parts and the ids of the tokens at `spans`."""
    parts: list[str | int] = []
    position = 0
    for start, end, token_id in spans:
        if start > position:
            parts.append(text[position:start])
        parts.append(token_id)
        position = end
    if position < len(text):
        parts.append(text[position:])
    return parts


def _byte_level_style(vocabulary: Vocabulary) -> _Style:
    spec = find_pre_tokenizer(vocabulary.pre, vocabulary.warnings)
    return _Style(
        encoder=create_byte_level_encoder(vocabulary, spec),
        is_byte_level=True,
        add_bos=spec.add_bos if vocabulary.add_bos is None else vocabulary.add_bos,
        strips_leading_space=False,
    )


def _sentencepiece_style(vocabulary: Vocabulary) -> _Style:
    # Ids that SentencePiece gives these tokens unless told otherwise.
    for name, default in (("unknown", 0), ("bos", 1), ("eos", 2)):
        if default < len(vocabulary.tokens) and vocabulary.types[default] in (CONTROL, UNKNOWN):
            vocabulary.special.setdefault(name, default)
    add_space_prefix = vocabulary.add_space_prefix is not False
    return _Style(
        encoder=create_sentencepiece_encoder(vocabulary, add_space_prefix=add_space_prefix),
        is_byte_level=False,
        add_bos=vocabulary.add_bos is not False,
        strips_leading_space=add_space_prefix,
    )
