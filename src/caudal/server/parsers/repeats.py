"""Ends a turn in which a model that must call says the same again and again."""

from __future__ import annotations

from collections.abc import Iterable

from caudal.server.parsers.parts import CallArguments, CallStart, Part, decoded_arguments, merged


class RepeatFilter:
    """Drops a call that is equal to an earlier one, and everything after it.

    A call of a function that was called before is held back while it reads like an earlier one.
    """

    __slots__ = ("_earlier", "_held", "_name", "_text", "is_done")

    def __init__(self) -> None:
        self._earlier: list[tuple[str, str]] = []
        self._held: list[Part] = []
        self._name = ""
        self._text: list[str] = []  # arguments of the call at hand
        self.is_done = False
        """A call has been repeated."""

    def push(self, parts: Iterable[Part]) -> list[Part]:
        """The parts that may be passed on."""
        passed: list[Part] = []
        for part in parts:
            if self.is_done:
                break
            match part:
                case CallStart(_, _, name):
                    passed += self.finish()
                    self._earlier.append((self._name, "".join(self._text)))
                    self._name, self._text = name, []
                    is_known = any(earlier == name for earlier, _ in self._earlier)
                    (self._held if is_known else passed).append(part)
                case CallArguments(_, text):
                    self._text.append(text)
                    passed += self._compare(part) if self._held else [part]
                case _:
                    passed += self.finish()
                    passed.append(part)
        return merged(passed)

    def finish(self) -> list[Part]:
        """What is held back."""
        held, self._held = self._held, []
        return held

    def _compare(self, part: Part) -> list[Part]:
        self._held.append(part)
        text = "".join(self._text)
        alike = [
            earlier
            for name, earlier in self._earlier
            if name == self._name and earlier.startswith(text)
        ]
        if text in alike and decoded_arguments(text) is not None:
            self.is_done = True
            self._held = []
        return [] if alike else self.finish()
