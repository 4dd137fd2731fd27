"""The latest requests as a load: when they came, how long they were, what they had in common."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from caudal.config import BLOCK_SIZE
from caudal.diagnosis.report import LoadRecord

MAX_ENTRIES = 4096
MAX_TOKENS = 1 << 19
"""Prompt tokens that are remembered: about 8 MB with what is derived from them."""
_BYTES = 4


@dataclass(frozen=True, slots=True)
class Arrival:
    """What the server knows of a request when it hands it to the engine."""

    request_id: str
    arrival_s: float
    owner: str
    """Whose it is: only they get to see anything of its text."""
    namespace: str
    """Requests of different namespaces share no prefixes."""
    num_prompt_tokens: int
    max_tokens: int
    is_lintable: bool = True
    """False: what was found in the cache says nothing about it (siblings, prompt logprobs)."""


@dataclass(frozen=True, slots=True)
class Occupancy:
    """The engine when a request came."""

    num_waiting: int = 0
    num_running: int = 0
    kv_used: float = 0.0


@dataclass(frozen=True, slots=True)
class End:
    """How a request was served; milliseconds."""

    num_output_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    queue_ms: float
    ttft_ms: float | None
    tpot_ms: float | None
    e2e_ms: float


class Entry:
    """A remembered request."""

    __slots__ = (
        "arrival",
        "chain",
        "end",
        "is_refused",
        "neighbour",
        "num_shared_blocks",
        "occupancy",
        "serial",
        "tokens",
    )

    def __init__(self, serial: int, arrival: Arrival, occupancy: Occupancy) -> None:
        self.serial = serial
        self.arrival = arrival
        self.occupancy = occupancy
        self.tokens: array[int] = array("i")
        """Empty where prompts are not remembered."""
        self.chain: tuple[int, ...] = ()
        """One per full block: a hash of all tokens up to its end."""
        self.neighbour: int | None = None
        """Serial of the latest earlier request with the longest common beginning."""
        self.num_shared_blocks = 0
        self.end: End | None = None
        self.is_refused = False


class LoadLog:
    """A bounded ring of requests. Owned by the event loop; reading copies.

    With `remember_prompts` it keeps token ids, from which it derives what prompts share and the
    prefix lint what keeps them from sharing more.
    """

    def __init__(
        self,
        *,
        remember_prompts: bool = True,
        max_entries: int = MAX_ENTRIES,
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        self.remembers_prompts = remember_prompts
        self._max_entries = max_entries
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._serials = itertools.count()
        self._entries: dict[int, Entry] = {}
        """By serial, oldest first."""
        self._open: dict[str, Entry] = {}
        self._by_prefix: dict[int, Entry] = {}
        self._latest: dict[tuple[str, str], Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_tokens(self) -> int:
        """Prompt tokens remembered."""
        return self._num_tokens

    def arrive(self, arrival: Arrival, token_ids: Sequence[int], occupancy: Occupancy) -> None:
        """A request goes to the engine."""
        entry = Entry(next(self._serials), arrival, occupancy)
        if self.remembers_prompts:
            self._remember(entry, token_ids)
        self._entries[entry.serial] = self._open[arrival.request_id] = entry
        while self._entries and (
            len(self._entries) > self._max_entries or self._num_tokens > self._max_tokens
        ):
            self._forget(next(iter(self._entries.values())))

    def finish(self, request_id: str, end: End) -> None:
        """A request has ended; unknown ids are ignored."""
        entry = self._open.pop(request_id, None)
        if entry is not None:
            entry.end = end

    def give_up(self, request_ids: Iterable[str], *, is_refused: bool) -> None:
        """The engine did not take requests: refused for overload, or they never really came."""
        for request_id in request_ids:
            entry = self._open.pop(request_id, None)
            if entry is None:
                continue
            if is_refused:
                entry.is_refused = True
            elif entry.serial in self._entries:
                self._forget(entry)

    def entries(self) -> list[Entry]:
        """All that is remembered, oldest first."""
        return list(self._entries.values())

    def entry(self, serial: int | None) -> Entry | None:
        """An entry by its serial, None once it is forgotten."""
        return None if serial is None else self._entries.get(serial)

    def records(self, seconds: float | None = None) -> list[LoadRecord]:
        """Ended and refused requests in order of arrival, beginnings numbered as they came.

        Those of the last `seconds` before the latest arrival; None: all.
        """
        entries = [e for e in self._entries.values() if e.end is not None or e.is_refused]
        entries.sort(key=lambda entry: entry.arrival.arrival_s)
        if seconds is not None and entries:
            start_s = entries[-1].arrival.arrival_s - seconds
            entries = [entry for entry in entries if entry.arrival.arrival_s >= start_s]
        numbers: dict[int, int] = {}
        made = []
        for entry in entries:
            ids = tuple(numbers.setdefault(key, len(numbers)) for key in entry.chain)
            made.append(_record(entry, ids))
        return made

    def _remember(self, entry: Entry, token_ids: Sequence[int]) -> None:
        """Keep the tokens, and find the neighbour before becoming one."""
        arrival = entry.arrival
        entry.tokens = array("i", token_ids)
        self._num_tokens += len(entry.tokens)
        raw, width = entry.tokens.tobytes(), BLOCK_SIZE * _BYTES
        key = hash((arrival.owner, arrival.namespace))
        chain = []
        for at in range(0, len(raw) - width + 1, width):
            key = hash((key, raw[at : at + width]))
            chain.append(key)
        entry.chain = tuple(chain)
        by_prefix = self._by_prefix
        neighbour = self._latest.get((arrival.owner, arrival.namespace))
        num_shared = 0
        for key in chain:
            found = by_prefix.get(key)
            if found is None:
                break
            neighbour = found
            num_shared += 1
        entry.num_shared_blocks = num_shared
        entry.neighbour = None if neighbour is None else neighbour.serial
        for key in chain:
            by_prefix[key] = entry
        self._latest[arrival.owner, arrival.namespace] = entry

    def _forget(self, entry: Entry) -> None:
        del self._entries[entry.serial]
        arrival, by_prefix = entry.arrival, self._by_prefix
        if self._open.get(arrival.request_id) is entry:
            del self._open[arrival.request_id]
        self._num_tokens -= len(entry.tokens)
        for key in entry.chain:
            if by_prefix.get(key) is entry:
                del by_prefix[key]
        if self._latest.get((arrival.owner, arrival.namespace)) is entry:
            del self._latest[arrival.owner, arrival.namespace]


def _record(entry: Entry, prefix_ids: tuple[int, ...]) -> LoadRecord:
    arrival, occupancy, end = entry.arrival, entry.occupancy, entry.end
    return LoadRecord(
        arrival_s=arrival.arrival_s,
        num_prompt_tokens=arrival.num_prompt_tokens,
        num_output_tokens=0 if end is None else end.num_output_tokens,
        max_tokens=arrival.max_tokens,
        num_cached_tokens=0 if end is None else end.num_cached_tokens,
        ttft_ms=None if end is None else end.ttft_ms,
        tpot_ms=None if end is None else end.tpot_ms,
        num_waiting=occupancy.num_waiting,
        num_running=occupancy.num_running,
        kv_used=occupancy.kv_used,
        num_preemptions=0 if end is None else end.num_preemptions,
        is_refused=entry.is_refused,
        prefix_ids=prefix_ids,
    )
