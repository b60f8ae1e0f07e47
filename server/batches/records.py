"""FileRecord, BatchRecord: facts about a stored file and a batch, as the folder holds them, and as clients get them.

Owner: none, values. Times are whole seconds since 1970.
"""

from __future__ import annotations

import secrets
from typing import Any, Literal

import msgspec

Purpose = Literal["batch", "batch_output"]
Record = msgspec.Struct


def new_id(prefix: str) -> str:
    """An id that no client can guess."""
    return prefix + secrets.token_hex(16)


class FileRecord(Record, kw_only=True):
    """A complete file. `key`: the name of the API key that owns it."""

    id: str
    key: str
    filename: str
    purpose: Purpose
    bytes: int
    created_at: int
    expires_at: int | None = None

    def public(self) -> dict[str, Any]:
        """The file object of OpenAI's API."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
ENDED: tuple[Status, ...] = ("failed", "completed", "expired", "cancelled")
TIMES = (
    "in_progress_at", "expires_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at",
    "cancelled_at",
)  # fmt: skip


class Problem(Record, kw_only=True):
    """What is wrong with a file, or with a line of it."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Usage(Record, kw_only=True):
    """Tokens of all answers of a batch."""

    input: int = 0
    cached: int = 0
    output: int = 0
    reasoning: int = 0

    def add(self, other: Usage) -> None:
        self.input += other.input
        self.cached += other.cached
        self.output += other.output
        self.reasoning += other.reasoning

    def public(self) -> dict[str, Any]:
        return {
            "input_tokens": self.input,
            "input_tokens_details": {"cached_tokens": self.cached},
            "output_tokens": self.output,
            "output_tokens_details": {"reasoning_tokens": self.reasoning},
            "total_tokens": self.input + self.output,
        }


class BatchRecord(Record, kw_only=True):
    """A batch. `outputs`, `errors`: the ids of its files, which exist as files of the key once the batch has ended."""

    id: str
    key: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    outputs: str
    errors: str
    status: Status = "validating"
    metadata: dict[str, str] | None = None
    output_seconds: int | None = None  # after which the files of the answers are deleted
    times: dict[str, int] = {}
    total: int = 0
    completed: int = 0
    failed: int = 0
    has_outputs: bool = False
    has_errors: bool = False
    model: str | None = None
    problems: list[Problem] = []
    usage: Usage = msgspec.field(default_factory=Usage)

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    def public(self) -> dict[str, Any]:
        """The batch object of OpenAI's API."""
        problems = [msgspec.structs.asdict(problem) for problem in self.problems]
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": {"object": "list", "data": problems} if problems else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.outputs if self.has_outputs else None,
            "error_file_id": self.errors if self.has_errors else None,
            "created_at": self.created_at,
            **{name: self.times.get(name) for name in TIMES},
            "expires_at": self.expires_at,
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "usage": self.usage.public(),
            "metadata": self.metadata,
        }
