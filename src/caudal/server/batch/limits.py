"""Bounds of files and batches."""

from __future__ import annotations

from dataclasses import dataclass

MAX_LINE_BYTES = 1024 * 1024
"""Longest line of an input file; far beyond any context length."""
MAX_CUSTOM_ID_CHARS = 512
MAX_WINDOW_S = 30 * 24 * 3600
MIN_FILE_LIFETIME_S = 3600
MAX_FILE_LIFETIME_S = MAX_WINDOW_S


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What one server keeps and does at once."""

    max_file_bytes: int = 512 * 1024 * 1024
    """Largest upload."""
    max_requests: int = 1_000_000
    """Requests in one input file."""
    max_errors: int = 100
    """Validation errors that a failed batch lists."""
    max_active: int = 256
    """Batches of one owner that are not at their end."""
    max_uploads: int = 8
    """Uploads of one owner at the same time."""
    max_stored_bytes: int = 32 * 1024 * 1024 * 1024
    """Bytes in the files of one owner, above which uploads are refused."""
    commit_interval_s: float = 0.5
    """Results are written and synced this often: what a killed server runs again."""
    max_attempts: int = 3
    """Times that a request may be in flight when an engine dies, before it counts as failed."""
    retry_failed_job_s: float = 10.0
    """Pause after an unexpected failure (a full disk) before a batch goes on."""
    sweep_interval_s: float = 600.0
    """Between two looks for expired files."""
