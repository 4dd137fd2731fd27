"""Records as the API shows them."""

from __future__ import annotations

from caudal.server.batch.records import BatchRecord, FileRecord
from caudal.server.protocol.batches import (
    BatchErrors,
    BatchObject,
    BatchRequestCounts,
    BatchUsage,
    InputTokensDetails,
    OutputTokensDetails,
)
from caudal.server.protocol.files import FileObject


def file_object(record: FileRecord) -> FileObject:
    """A file for its owner."""
    return FileObject(
        id=record.id,
        object="file",
        bytes=record.num_bytes,
        created_at=record.created_at,
        expires_at=record.expires_at,
        filename=record.filename,
        purpose=record.purpose,
        status="processed",
    )


def batch_object(record: BatchRecord) -> BatchObject:
    """A batch for its owner."""
    usage = record.usage
    return BatchObject(
        id=record.id,
        object="batch",
        endpoint=record.endpoint,
        model=record.model,
        errors=BatchErrors("list", record.errors) if record.errors else None,
        input_file_id=record.input_file_id,
        completion_window=record.completion_window,
        status=record.status,
        output_file_id=record.output_file_id if record.has_output else None,
        error_file_id=record.error_file_id if record.has_errors else None,
        created_at=record.created_at,
        in_progress_at=record.in_progress_at,
        expires_at=int(record.deadline),
        finalizing_at=record.finalizing_at,
        completed_at=record.completed_at,
        failed_at=record.failed_at,
        expired_at=record.expired_at,
        cancelling_at=record.cancelling_at,
        cancelled_at=record.cancelled_at,
        request_counts=BatchRequestCounts(
            record.num_total, record.num_completed, record.num_failed
        ),
        usage=BatchUsage(
            input_tokens=usage.num_input,
            input_tokens_details=InputTokensDetails(usage.num_cached),
            output_tokens=usage.num_output,
            output_tokens_details=OutputTokensDetails(0),
            total_tokens=usage.num_input + usage.num_output,
        ),
        metadata=record.metadata,
    )
