"""What an engine core needs of the machinery that computes steps."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from caudal.config import ModelConfig
from caudal.executor.memory_plan import MemoryPlan
from caudal.sampling_params import StructuredOutputsParams
from caudal.step_io import Interrupt, ModelRunnerOutput, SchedulerOutput


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """What is fixed once the model has loaded."""

    model: ModelConfig
    memory: MemoryPlan
    eog_token_ids: frozenset[int]
    max_num_logits: int
    isa: str
    num_threads: int
    load_ms: float


class Executor(Protocol):
    """Runs SchedulerOutputs on one or more ranks."""

    @property
    def info(self) -> ExecutorInfo: ...

    def prepare(self, params: StructuredOutputsParams) -> Future[Any]:
        """Compile a grammar without waiting; the future raises InvalidRequestError."""

    def execute(
        self, output: SchedulerOutput, interrupt: Interrupt | None = None
    ) -> ModelRunnerOutput:
        """Compute one step; blocking. `interrupt` may end it early if it is interruptible."""

    def inject_fault(self, request_id: str, after_output_tokens: int) -> None:
        """Tests only: make the row of `request_id` raise after so many output tokens."""

    def shutdown(self) -> None:
        """Release threads and memory."""
