"""BatchFlags: uploaded files, and batches of requests; a group of Config. Frozen, read everywhere."""

from __future__ import annotations

from dataclasses import dataclass

from server.flags.flag import MIB, flag


@dataclass(frozen=True, slots=True)
class BatchFlags:
    """Flags of /v1/files and /v1/batches."""

    files_dir: str = flag("", "folder of uploaded files and batches, for one server; none: a private one until the end")
    files_bytes: int = flag(10240 * MIB, "all uploaded files and answers of batches", low=1024)
    max_batch_file_bytes: int = flag(100 * MIB, "one uploaded file", low=1024)
    batch_slowdown: float = flag(1.5, "most times that a step takes longer with lines of batches than without", low=1)
