"""A chat model that runs in this process, through the offline facade."""

from __future__ import annotations

from collections.abc import Iterator

from caudal.cli.conversation import Message, Reply, Sampling
from caudal.config import CacheConfig, ParallelConfig, SchedulerConfig, WeightsConfig
from caudal.llm import LLM
from caudal.sampling_params import SamplingParams

UNLIMITED_TOKENS = 2**31 - 1
"""Clamped to what the context leaves."""


class LocalModel:
    """Owns an engine in this process."""

    def __init__(
        self,
        name: str,
        cache: CacheConfig,
        scheduler: SchedulerConfig,
        parallel: ParallelConfig,
        weights: WeightsConfig,
    ) -> None:
        """Load the model, fetched first if needed; raises the errors of both."""
        self.name = name
        self._llm = LLM(
            name,
            cache=cache,
            scheduler=scheduler,
            num_threads=parallel.num_threads,
            weights=weights,
        )

    def stream(self, messages: list[Message], sampling: Sampling, reply: Reply) -> Iterator[str]:
        """Pieces of the answer as the steps produce them; fills `reply` at the end."""
        fields = {"max_tokens": UNLIMITED_TOKENS, **sampling.as_fields()}
        num_shown = 0
        for completion in self._llm.stream_chat(messages, SamplingParams(**fields)):
            piece = completion.text[num_shown:]
            num_shown += len(piece)
            reply.num_tokens = len(completion.token_ids)
            reply.finish_reason = completion.finish_reason
            if piece:
                yield piece

    def close(self) -> None:
        """The engine goes with the process."""
