"""The format of the log: one line per event, control characters escaped, repeats counted.

Owner: any thread (logging's own lock); another thread writes (log_lines). Lines never hold prompts, outputs, media,
queries, headers, keys (SECURITY S9): the callers ensure this. This module does the rest: format, rate limit, tracebacks
of our own errors without locals. Only the logger omniloop.words may log text, and only while the operator has enabled
it.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any

from engine.base.request import Request, SamplingParams
from server.flags.config import ServerConfig
from server.ops.log_lines import LineWriter

words = logging.getLogger("omniloop.words")  # text of clients and of the model, only if the operator enables it

_ESCAPES = {code: f"\\x{code:02x}" for code in [*range(32), 127, *range(128, 160)]} | {
    0x2028: "\\u2028",
    0x2029: "\\u2029",
}


class TextLines(logging.Formatter):
    """Formats lines such as `2026-01-02 03:04:05.678 info omniloop.access ...`."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        line = f"{stamp}.{int(record.msecs):03d} {record.levelname.lower()} {record.name} {record.getMessage()}"
        line = line.translate(_ESCAPES)
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonLines(logging.Formatter):
    """Formats one JSON object per line; a request's line has its numbers as separate fields."""

    def format(self, record: logging.LogRecord) -> str:
        content = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            content["traceback"] = self.formatException(record.exc_info)
        return json.dumps(content)


class Rate(logging.Filter):
    """Passes at most `limit` lines per second of one format string; reports how many were left out."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.second = 0
        self.seen: dict[str, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if int(record.created) != self.second:
            left_out = sum(max(0, count - self.limit) for count in self.seen.values())
            self.second, self.seen = int(record.created), {}
            if left_out:
                record.msg = f"{record.msg} ({left_out} similar lines left out)"
        key = str(record.msg)
        self.seen[key] = self.seen.get(key, 0) + 1
        return self.seen[key] <= self.limit


class Written(logging.Handler):
    """Formats in the thread that logs; the writer's thread writes."""

    def __init__(self, writer: LineWriter) -> None:
        super().__init__()
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        self._writer.add(self.format(record) + "\n")

    def flush(self) -> None:
        """Flush at the end of the process, without waiting for a stopped reader."""
        self._writer.flush()


def _no_output() -> None:
    logging.getLogger("omniloop").warning("standard output takes no lines: nothing reads it, or its disk is full")


_errors, _output = LineWriter(2), LineWriter(1, _no_output)


def lines_dropped() -> int:
    """Number of log lines that were dropped because no reader took them in time."""
    return _errors.dropped


def say(text: str) -> None:
    """Print a line to standard output, for the process that started the server."""
    _output.add(text + "\n")


def configure(server: ServerConfig) -> None:
    """Configure logging; call once, before anything logs."""
    handler = Written(_errors)
    handler.setFormatter(JsonLines() if server.log_format == "json" else TextLines())
    handler.addFilter(Rate(server.log_rate))
    logging.captureWarnings(True)
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("omniloop").setLevel(server.log_level.upper())
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    logging.getLogger("asyncio").setLevel(logging.WARNING)


def log_prompt(request_id: str, text: str | None, request: Request, max_len: int) -> None:
    """Log the beginning of a prompt and its parameters (--enable-log-requests); token ids if it has no text."""
    ids = request.prompt_token_ids
    text = text if text is not None else " ".join(map(str, ids[: max_len // 4].tolist()))
    params = ", ".join(f"{name}={value!r}" for name, value in changed_parameters(request.sampling))
    words.info("%s asks: %s | %d tokens, n=%d, %s", request_id, text[:max_len], len(ids), request.n, params[:1024])


def changed_parameters(sampling: SamplingParams) -> Iterator[tuple[str, Any]]:
    """The sampling parameters that differ from their defaults."""
    for item in dataclasses.fields(sampling):
        value = getattr(sampling, item.name)
        if value != item.default and item.name != "eos_token_ids":
            yield item.name, value


def log_text(request_id: str, text: str, num_tokens: int, finish_reason: str | None) -> None:
    """Log the beginning of an answer (--enable-log-outputs)."""
    words.info("%s gets: %s | %d tokens, %s", request_id, text, num_tokens, finish_reason)


def log_startup(seconds: Mapping[str, float], total: float) -> None:
    """Log the duration of the start and its longest phases; each phase at debug level. Phases overlap."""
    log = logging.getLogger("omniloop")
    for name, duration in seconds.items():
        log.debug("start: %-24s %.3f s", name, duration)
    longest = sorted(((duration, name) for name, duration in seconds.items() if name != "engine"), reverse=True)[:4]
    log.info("start: ready after %.2f s; %s", total, ", ".join(f"{name} {spent:.2f} s" for spent, name in longest))
