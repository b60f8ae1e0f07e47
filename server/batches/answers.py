"""Answers: the file to which a batch's answers are appended, a line each, and what a start finds in it.

Thread: one call at a time, in the pool. A line that was cut by the end of the process is removed, and so is the part of
a line that no longer fitted on the disk; the file then has whole lines only.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from server.batches.records import Usage

READ = 1 << 20


class TokenCounts(msgspec.Struct):
    """The usage of an answer, in the words of any endpoint."""

    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    input_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens_details: dict[str, Any] | None = None
    input_tokens_details: dict[str, Any] | None = None
    completion_tokens_details: dict[str, Any] | None = None
    output_tokens_details: dict[str, Any] | None = None


class Body(msgspec.Struct):
    usage: TokenCounts | None = None


class Response(msgspec.Struct):
    body: Body


class OutLine(msgspec.Struct):
    """A line of the file, as far as a start reads it."""

    custom_id: str
    response: Response | None = None


class Answers:
    """One file; it is made with the first line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0  # bytes of whole lines

    def recover(self) -> tuple[set[str], Usage]:
        """The ids of the lines that the file has, and their tokens; cuts off the part of a line at the end."""
        found, usage = set[str](), Usage()
        if not self.path.exists():
            return found, usage
        with self.path.open("r+b", buffering=READ) as file:
            for data in file:
                try:
                    line = msgspec.json.decode(data, type=OutLine)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    break
                if not data.endswith(b"\n"):
                    break
                found.add(line.custom_id)
                self.size += len(data)
                if line.response is not None and line.response.body.usage is not None:
                    usage.add(tokens_of(line.response.body.usage))
            file.truncate(self.size)
        return found, usage

    def append(self, lines: list[bytes]) -> None:
        """Append whole lines and bring them to the disk; if this raises OSError, the file is as before."""
        handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            view, at = memoryview(b"".join(lines)), self.size
            while view:
                written = os.pwrite(handle, view, at)
                view, at = view[written:], at + written
            os.fsync(handle)
            self.size = at
        except OSError:
            os.ftruncate(handle, self.size)
            raise
        finally:
            os.close(handle)


def usage_of(body: bytes) -> Usage:
    """The tokens that an answer reports."""
    try:
        counts = msgspec.json.decode(body, type=Body).usage
    except (msgspec.DecodeError, UnicodeDecodeError):
        counts = None
    return Usage() if counts is None else tokens_of(counts)


def tokens_of(counts: TokenCounts) -> Usage:
    inputs = counts.prompt_tokens_details or counts.input_tokens_details or {}
    outputs = counts.completion_tokens_details or counts.output_tokens_details or {}
    return Usage(
        input=counts.prompt_tokens or counts.input_tokens,
        cached=inputs.get("cached_tokens") or 0,
        output=(counts.completion_tokens or 0) or counts.output_tokens,
        reasoning=outputs.get("reasoning_tokens") or 0,
    )
