"""Requests that wait for their grammars to be compiled before they can be admitted."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from caudal.engine.messages import EngineRequest, Refusal
from caudal.errors import InvalidRequestError, RequestError
from caudal.structured_output.limits import COMPILE_TIMEOUT_S

logger = logging.getLogger(__name__)

POLL_MS = 1
"""Time between two looks at the compilers while the engine is idle."""


@dataclass(slots=True)
class _Group:
    requests: list[EngineRequest]
    futures: Sequence[Future[Any]]
    deadline: float


class Preparations:
    """Groups of siblings in order of arrival; one that is ready does not wait for others."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._groups: list[_Group] = []

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, requests: list[EngineRequest], futures: Sequence[Future[Any]]) -> None:
        """Hold `requests` until all `futures` are done."""
        self._groups.append(_Group(requests, futures, self._clock() + COMPILE_TIMEOUT_S))

    def discard(self, request_ids: Sequence[str]) -> list[EngineRequest]:
        """Take out requests whose client has left; unknown ids are ignored."""
        gone: list[EngineRequest] = []
        ids = set(request_ids)
        for group in self._groups:
            gone += [each for each in group.requests if each.request_id in ids]
            group.requests = [each for each in group.requests if each.request_id not in ids]
        return gone

    def take(self) -> tuple[list[list[EngineRequest]], list[Refusal]]:
        """Groups that can be admitted now, and refusals of those whose grammars failed."""
        ready: list[list[EngineRequest]] = []
        refusals: list[Refusal] = []
        waiting: list[_Group] = []
        now = self._clock()
        for group in self._groups:
            if not all(future.done() for future in group.futures) and now < group.deadline:
                waiting.append(group)
                continue
            error = _first_error(group.futures)
            if error is not None:
                refusals += [_refusal(request, error) for request in group.requests]
            elif group.requests:
                ready.append(group.requests)
        self._groups = waiting
        return ready, refusals


def _first_error(futures: Sequence[Future[Any]]) -> RequestError | None:
    for future in futures:
        if not future.done():
            return InvalidRequestError(
                f"structured_outputs: not compiled within {COMPILE_TIMEOUT_S:.0f} s.",
                code="invalid_value",
            )
        error = future.exception()
        if isinstance(error, RequestError):
            return error
        if error is not None:
            logger.error("a grammar could not be compiled", exc_info=error)
            return InvalidRequestError(
                "structured_outputs: the grammar could not be compiled.", code="invalid_value"
            )
    return None


def _refusal(request: EngineRequest, error: RequestError) -> Refusal:
    return Refusal(
        request_id=request.request_id,
        message=error.message,
        reason="grammar",
        param=error.param or "structured_outputs",
        code=error.code,
    )
