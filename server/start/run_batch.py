"""`python -m server run-batch -i IN -o OUT`: answer the lines of a file without a server.

Owner: the main thread until the app exists, then the loop. In: the flags of `serve`, and two files. Out: OUT with the
answers, OUT.errors with the lines that failed, and an exit status. The app answers each line as it answers a request;
there are no sockets. Lines whose answer OUT holds do not run again, so an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import uvloop

from engine.base.errors import ConfigError, EngineError
from engine.device.host_memory import memory_limit
from server.app import make_app
from server.batches.files import Files
from server.batches.folder import Folder
from server.batches.lines import Checked, Rules, check_lines
from server.batches.records import BatchRecord
from server.batches.run import Run
from server.errors import ApiError
from server.flags.arguments import Arguments
from server.flags.command_line import Flag, UsageError, all_flags, flags_of
from server.flags.config import Config, flag
from server.flags.foreign_flags import FOREIGN
from server.flags.help import USAGE, grouped
from server.ops import logs
from server.start.batches import server_of, unknown_model
from server.start.budgets import fitted
from server.start.lifespan import Lifespan
from server.state import AppState

log = logging.getLogger("omniloop")
Say = Callable[[str], None]
Build = Callable[[dict[str, Any]], Config]
SHORT = {"-i": "--input-file", "-o": "--output-file"}
PROGRESS_S = 10.0
ERRORS = ".errors"  # behind the name of OUT
NO_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True)
class RunBatchOptions:
    """Flags that only `run-batch` has."""

    input_file: str = flag("", "file with a request in each line, as for /v1/batches (-i)")
    output_file: str = flag("", "file for the answers; failures go to OUT.errors (-o)")


def main(words: Sequence[str], say: Say, build: Build) -> int:
    """Run the command and return the exit status of the process: 1 if a line failed or the file is wrong."""
    try:
        read = parse(words, build)
    except UsageError as error:
        print(error.report, file=sys.stderr)
        return 2
    if read is None:
        say(f"{USAGE['run-batch']}\n\n{grouped(own_flags())}")
        return 0
    config, source, target = read
    # A line of the log for each of 50,000 requests would hide the others.
    config = replace(config, server=replace(config.server, disable_access_log=True, disable_log_stats=True))
    logs.configure(config.server)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(run_batch(config, source, target, say))
    except (EngineError, ApiError, OSError) as error:
        print(f"omniloop: {error}", file=sys.stderr)
        return 1


def own_flags() -> dict[str, Flag]:
    return flags_of(RunBatchOptions, "run-batch")


def parse(words: Sequence[str], build: Build) -> tuple[Config, Path, Path] | None:
    """The server's Config, IN and OUT; None: help is asked for. Raises UsageError."""
    arguments = Arguments(own_flags() | all_flags(), FOREIGN)
    arguments.read([SHORT.get(word, word) for word in words])
    if arguments.help is not None:
        return None
    values = arguments.values
    source, target = values.pop("input-file", ""), values.pop("output-file", "")
    if not source or not target:
        raise UsageError("run-batch: needs -i IN and -o OUT")
    return build(values), Path(source).absolute(), Path(target).absolute()


async def run_batch(config: Config, source: Path, target: Path, say: Say) -> int:
    """Check the file, load the model, answer the lines. Raises ConfigError, OSError, ApiError."""
    state = AppState(fitted(config, memory_limit()))
    make_app(state)
    rules = Rules("", lambda name: known(state, name), config.limits.max_request_bytes)
    checked = check_files(source, target, rules)
    for problem in checked.problems:
        print(f"omniloop: {source.name}:{problem.line or 1}: {problem.message}", file=sys.stderr)
    if checked.problems:
        return 1
    lifespan = Lifespan(state)
    try:
        await lifespan.start()
        if state.phase != "ready":
            raise ConfigError("the engine stopped working while it was loaded")
        return await answer(state, source, target, checked.total, say)
    finally:
        await lifespan.close()


def check_files(source: Path, target: Path, rules: Rules) -> Checked:
    """The lines of IN. Raises ConfigError if IN cannot be read, or OUT cannot be written."""
    if target.is_dir() or not os.access(target.parent, os.W_OK):  # else the run would wait for its disk without end
        raise ConfigError(f"-o {target}: no file can be written there; name a file in a folder of this user")
    try:
        return check_lines(source, rules)
    except OSError as error:
        raise ConfigError(f"-i {source}: {error.strerror}; name a file with a request in each line") from None


def known(state: AppState, name: str | None) -> str:
    """Why a model is not served, before it is known which adapters there are."""
    return "" if state.config.lora.enable_lora else unknown_model(state, name)


async def answer(state: AppState, source: Path, target: Path, total: int, say: Say) -> int:
    """Answer the lines that have no answer in `target`."""
    begun, server = time.monotonic(), server_of(state)
    record = BatchRecord(
        id="run-batch",
        key="",
        endpoint="",
        completion_window="",
        created_at=0,
        expires_at=0,
        input_file_id=str(source),  # an absolute path is its own place
        outputs=str(target),
        errors=str(target) + ERRORS,
    )
    files = Files(Folder(""), NO_LIMIT, float("inf"), state.pool)
    window = asyncio.Semaphore(server.window)
    run = Run(record, files, server.ask, window, server.max_line_bytes, Counter())
    progress = asyncio.ensure_future(report(record, total, say))
    try:
        await run.run(lambda: True)
    except asyncio.CancelledError:
        await run.store_once()
        raise
    finally:
        progress.cancel()
        files.folder.close()
    took = time.monotonic() - begun
    say(
        f"{record.completed} answers in {target}, {record.failed} failures in {target}{ERRORS}; {record.usage.input} "
        f"prompt tokens, {record.usage.output} generated, {took:.1f} s"
    )
    return 1 if record.failed else 0


async def report(record: BatchRecord, total: int, say: Say) -> None:
    """Print the progress from time to time."""
    while True:
        await asyncio.sleep(PROGRESS_S)
        say(f"{record.completed + record.failed} of {total} lines")
