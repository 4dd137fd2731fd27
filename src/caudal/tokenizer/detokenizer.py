"""Token ids to text while they arrive: whole characters only, stopping at stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from caudal.tokenizer.gguf_tokenizer import Tokenizer

_create_decoder = codecs.getincrementaldecoder("utf-8")


class DetokenizedDelta(NamedTuple):
    """What one `push` added."""

    text: str
    """Text that is final; empty while characters or possible stop strings are incomplete."""
    stopped_by: str | None
    """The stop string that ended the text."""
    num_tokens_used: int
    """Tokens of this push up to and including the one that ended the text; all if none did."""


class IncrementalDetokenizer:
    """The text of one growing sequence.

    The texts of all pushes, the last with `final`, add up to what `Tokenizer.decode` gives for all
    tokens, cut at the first stop string. Text is held back only while it is the beginning of a
    character or of a stop string. Of several stop strings the one that is complete first counts,
    the longest of those if they end together.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special: bool = True,
        initial_ids: Iterable[int] = (),
        min_tokens: int = 0,
    ) -> None:
        """`initial_ids` are what the text continues; without any, the space that a SentencePiece
        vocabulary puts before a text is left out. Stop strings count from text after the first
        `min_tokens` tokens."""
        self._piece = tokenizer.piece
        self._skip_special = skip_special
        self._shown_ids: frozenset[int] = frozenset()
        self._include_stop = include_stop
        self._stop = [text for text in stop if text]
        self._stop_after = min_tokens
        self._decoder = _create_decoder("replace")
        self._is_mid_character = False
        self._held = ""
        # Any text before makes the first space a real one.
        self._at_start = tokenizer.strips_leading_space and not any(
            tokenizer.piece(token_id).raw and not tokenizer.piece(token_id).is_special
            for token_id in initial_ids
        )
        self.num_tokens = 0
        self.stopped_by: str | None = None

    def show_special(self, token_ids: frozenset[int]) -> None:
        """From now on these special tokens are text even with `skip_special`."""
        self._shown_ids = token_ids

    def push(self, token_ids: Sequence[int], *, final: bool = False) -> DetokenizedDelta:
        """Text that `token_ids` complete; with `final`, all that is held back too.

        After a stop string further tokens are ignored.
        """
        if self.stopped_by is not None:
            return DetokenizedDelta("", self.stopped_by, 0)
        parts = []
        for index, token_id in enumerate(token_ids):
            self.num_tokens += 1
            text = self._decode(token_id)
            if self._stop and text:
                text = self._check_stop(text)
            parts.append(text)
            if self.stopped_by is not None:
                return DetokenizedDelta("".join(parts), self.stopped_by, index + 1)
        if final:
            parts.append(self._flush())
        text = parts[0] if len(parts) == 1 else "".join(parts)
        return DetokenizedDelta(text, self.stopped_by, len(token_ids))

    def _decode(self, token_id: int) -> str:
        piece = self._piece(token_id)
        if piece.is_special and self._skip_special and token_id not in self._shown_ids:
            return ""
        if piece.text is not None and not self._is_mid_character:
            text = piece.text
        else:
            text = self._decoder.decode(piece.raw)
            self._is_mid_character = bool(self._decoder.getstate()[0])
        return self._without_marker(text) if self._at_start and text else text

    def _without_marker(self, text: str) -> str:
        self._at_start = False
        return text[1:] if text.startswith(" ") else text

    def _check_stop(self, new: str) -> str:
        """The final part of held and new text; sets `stopped_by` if a stop string ends it."""
        text = self._held + new
        if self.num_tokens <= self._stop_after:
            return text
        ended = self._first_stop(text)
        if ended is not None:
            start, stop = ended
            self.stopped_by = stop
            self._held = ""
            return text[: start + len(stop)] if self._include_stop else text[:start]
        start = self._held_from(text)
        self._held = text[start:]
        return text[:start]

    def _first_stop(self, text: str) -> tuple[int, str] | None:
        found = [(start, stop) for stop in self._stop if (start := text.find(stop)) >= 0]
        return min(found, key=lambda match: (match[0] + len(match[1]), match[0]), default=None)

    def _held_from(self, text: str) -> int:
        """Where the longest end of `text` starts that is the beginning of a stop string."""
        earliest = len(text)
        for stop in self._stop:
            start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while 0 <= start < earliest:
                if stop.startswith(text[start:]):
                    earliest = start
                    break
                start = text.find(stop[0], start + 1)
        return earliest

    def _flush(self) -> str:
        rest = self._decoder.decode(b"", final=True)
        self._is_mid_character = False
        if rest and self._at_start:
            rest = self._without_marker(rest)
        if rest and self._stop:
            rest = self._check_stop(rest)
        if self.stopped_by is None:
            rest += self._held
            self._held = ""
        return rest
