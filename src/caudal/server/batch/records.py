"""What is known about files and batches, as the store keeps it."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from caudal.server.protocol.batches import BatchError

PURPOSE_INPUT = "batch"
PURPOSE_OUTPUT = "batch_output"


class BatchStatus(StrEnum):
    """OpenAI's life of a batch."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def is_terminal(self) -> bool:
        """Whether nothing will change any more."""
        return self in TERMINAL


TERMINAL = (
    BatchStatus.FAILED,
    BatchStatus.COMPLETED,
    BatchStatus.EXPIRED,
    BatchStatus.CANCELLED,
)


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A stored file; its content lies in the data directory under its id."""

    id: str
    owner: str
    purpose: str
    filename: str
    num_bytes: int
    created_at: int
    expires_at: int | None = None


class TokenUsage(msgspec.Struct):
    """Tokens of all completed requests of a batch."""

    num_input: int = 0
    num_cached: int = 0
    num_output: int = 0


class BatchRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A batch; written to the store at every change of its status."""

    id: str
    owner: str
    endpoint: str
    model: str
    """The served model's name when the batch was created; only that model runs it."""
    input_file_id: str
    completion_window: str
    created_at: int
    deadline: float
    """Seconds since the epoch."""
    output_file_id: str
    error_file_id: str
    """Ids of the result files; clients see them once the batch has ended and they have lines."""
    status: BatchStatus = BatchStatus.VALIDATING
    metadata: dict[str, str] | None = None
    output_lifetime_s: int | None = None
    num_total: int = 0
    num_prompt_tokens: int = 0
    """Of all requests; only counted for keys that have a limit of them."""
    num_completed: int = 0
    num_failed: int = 0
    usage: TokenUsage = msgspec.field(default_factory=TokenUsage)
    errors: list[BatchError] = []
    has_output: bool = False
    has_errors: bool = False
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None

    def enter(self, status: BatchStatus, now: float) -> None:
        """Change the status and note when."""
        self.status = status
        setattr(self, f"{status.value}_at", int(now))


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """Which part of a list is wanted."""

    limit: int
    after: str | None = None
    is_ascending: bool = False
    purpose: str | None = None
