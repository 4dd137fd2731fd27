"""What a generation request asks for, independent of the API that it came through."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from msgspec.structs import replace

from caudal.engine.messages import EngineRequest
from caudal.errors import ContextLengthError
from caudal.sampling_params import SamplingParams
from caudal.scheduler.service_class import ServiceClass
from caudal.server.parsers.output_parser import OutputRules


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: its tokens, its text as echoed, and how much may follow it."""

    token_ids: list[int]
    text: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class StreamFormat:
    """How an answer is delivered."""

    is_stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False


@dataclass(frozen=True, slots=True)
class TextRules:
    """How tokens become text."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    echo: bool = False
    shown_token_ids: frozenset[int] = frozenset()
    """Special tokens that count as text nevertheless: marks that the parser looks for."""


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """A validated request: `len(prompts) * n` choices."""

    request_id: str
    arrival: float
    """Seconds on the monotonic clock."""
    prompts: list[Prompt]
    n: int
    sampling: SamplingParams
    """Common to all choices but for max_tokens (per prompt) and seed (seed + choice number)."""
    text: TextRules = field(default_factory=TextRules)
    output: OutputRules | None = None
    """What is parsed out of the text; None: it is all content."""
    stream: StreamFormat = field(default_factory=StreamFormat)
    num_logprobs: int | None = None
    """As asked for: None is none, 0 only the sampled token's."""
    num_prompt_logprobs: int | None = None
    priority: int = 0
    service: ServiceClass = ServiceClass.INTERACTIVE
    namespace: str = ""
    service_tier: str | None = None
    """As asked for, then as given; None: nobody asked."""
    timeout_s: float | None = None
    """Seconds from `arrival` within which the answer must be complete."""
    tenant: str = ""
    weight: float = 1.0
    path: str = ""
    """Of the HTTP request."""
    traceparent: str = ""
    """The caller's trace, as its header says."""

    def engine_requests(self) -> list[EngineRequest]:
        """One request per choice, in the order of the choices' indices."""
        requests: list[EngineRequest] = []
        num_choices = len(self.prompts) * self.n
        parent = self.request_id if num_choices > 1 else None
        timeout_s = None
        if self.timeout_s is not None:
            timeout_s = max(0.0, self.timeout_s - (time.monotonic() - self.arrival))
        for prompt in self.prompts:
            for number in range(self.n):
                name = self.request_id if parent is None else f"{self.request_id}-{len(requests)}"
                request = EngineRequest(
                    request_id=name,
                    prompt_token_ids=prompt.token_ids,
                    sampling=self._sampling(prompt, number),
                    priority=self.priority,
                    service=self.service,
                    namespace=self.namespace,
                    tenant=self.tenant,
                    weight=self.weight,
                    timeout_s=timeout_s,
                    parent_id=parent,
                    num_siblings=num_choices,
                )
                requests.append(request)
        return requests

    def _sampling(self, prompt: Prompt, number: int) -> SamplingParams:
        seed = self.sampling.seed
        if seed is not None and number:
            seed = (seed + number + 2**63) % 2**64 - 2**63
        return replace(
            self.sampling,
            max_tokens=prompt.max_tokens,
            min_tokens=min(self.sampling.min_tokens, prompt.max_tokens),
            seed=seed,
        )


def fit_max_tokens(
    asked: int | None, default: int | None, num_prompt_tokens: int, max_model_len: int
) -> int:
    """Output tokens that fit: `asked` (or `default`; None: all that is left), clamped.

    Raises ContextLengthError when the prompt leaves no room for what is asked.
    """
    room = max_model_len - num_prompt_tokens
    wanted = default if asked is None else asked
    if room < 0 or (room == 0 and wanted != 0):
        raise ContextLengthError(num_prompt_tokens, max_model_len, asked)
    return room if wanted is None else min(wanted, room)
