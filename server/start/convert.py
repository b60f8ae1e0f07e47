"""`python -m server convert FOLDER`: write the weights of pickled files (.bin, .pt) as safetensors next to them.

Owner: the main thread. In: a folder. Out: lines for people; the exit status is 0 if files were written. Each file is
read by a separate process without network, with bounded memory (unpickle); the server itself never reads a pickle.
Files are written into a temporary folder and get their names when all are complete: a failure leaves nothing.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from engine.base.errors import ConfigError
from engine.checkpoint.pooling_tokens import COLBERT, SPARSE
from engine.weights.files import INDEX, NUMBERED, PICKLED, SINGLE, read_header
from mm.isolation.helper import environment
from server.flags.help import USAGE

Say = Callable[[str], None]
SHARD = re.compile(r"pytorch_model(-\d{5}-of-\d{5})\.bin")
WHOLE = "pytorch_model.bin"
HEADS = tuple(f"{name}.pt" for name in (SPARSE, COLBERT))
# What trainers store next to weights.
NOT_WEIGHTS = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state|random_states).*")
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)  # file systems without hard links
SPARE_BYTES = 1 << 30  # memory of the process beyond twice the file
BYTES_PER_S = 10 << 20  # processor time: this rate, and a minute
MAX_REPLY = 4096
WAIT = 20  # most seconds of waiting per second of processor time


class Job(NamedTuple):
    """A file to convert."""

    source: Path
    target: Path


def main(words: Sequence[str], say: Say) -> int:
    """Run the command and return the exit status of the process."""
    if not words or words[0] in ("-h", "--help"):
        say(USAGE["convert"])
        return 0 if words else 2
    if len(words) > 1 or words[0].startswith("-"):
        print(f"omniloop: convert {' '.join(words)}: give one folder, and nothing else", file=sys.stderr)
        return 2
    try:
        convert(Path(words[0]), say)
    except ConfigError as error:
        print(f"omniloop: {error}", file=sys.stderr)
        return 1
    return 0


def convert(folder: Path, say: Say) -> None:
    """Convert all weight files of the folder. Raises ConfigError, and then has written nothing."""
    if not folder.is_dir():
        raise ConfigError(f"convert {folder}: there is no such folder")
    jobs = []
    for job in jobs_of(folder):
        if os.path.lexists(job.target):
            say(f"{job.source.name}: {job.target.name} is there already, and is left as it is")
        else:
            jobs.append(job)
    if not jobs:
        raise ConfigError(
            f"convert {folder}: nothing to convert; it needs {WHOLE} or another file of {', '.join(PICKLED)}"
        )
    needed = sum(job.source.stat().st_size for job in jobs)
    if needed > (free := shutil.disk_usage(folder).free):
        raise ConfigError(f"convert {folder}: {needed:,} bytes are to be written, and the disk has {free:,} free")
    try:
        with tempfile.TemporaryDirectory(prefix=".convert-", dir=folder) as name:
            made = [run(job, Path(name) / f"{number}") for number, job in enumerate(jobs)]
            made += index_of(folder, made, Path(name))
            publish(made, say)
    except OSError as error:
        raise ConfigError(f"convert {folder}: {error.strerror}; nothing was written") from None
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"convert {folder}: a file took more than {error.timeout:,.0f} s; nothing was written"
        ) from None


def jobs_of(folder: Path) -> list[Job]:
    """The folder's weight files by their usual names; without one of these names, all pickled files but a trainer's."""
    names = {path.name for path in folder.iterdir() if path.suffix in PICKLED}
    usual = [name for name in names if SHARD.fullmatch(name) or name in (WHOLE, "adapter_model.bin", *HEADS)]
    chosen = usual or [name for name in names if not NOT_WEIGHTS.fullmatch(name)]
    sources = [folder / name for name in sorted(chosen)]
    sources += sorted(path for path in folder.glob(f"*/{WHOLE}"))
    return [Job(checked(folder, source), source.with_name(target_of(source.name))) for source in sources]


def target_of(name: str) -> str:
    if match := SHARD.fullmatch(name):
        return f"model{match[1]}.safetensors"
    return SINGLE if name == WHOLE else f"{Path(name).stem}.safetensors"


def checked(folder: Path, source: Path) -> Path:
    """The source, which must be a file of this folder or, as a link, of its cache of the hub."""
    found, place = source.resolve(), folder.resolve()
    blobs = place.parent.parent / "blobs"  # CACHE/snapshots/REVISION has links to CACHE/blobs
    if not found.is_file():
        raise ConfigError(f"{source} is no file; download the checkpoint again")
    if not found.is_relative_to(place) and found.parent != blobs:
        raise ConfigError(f"{source} is a link to {found}, outside of the folder; replace it by the file")
    return source


def run(job: Job, target: Path) -> Job:
    """Convert one file into `target`; returns where it is and where it belongs."""
    size = job.source.stat().st_size
    memory, seconds = 2 * size + SPARE_BYTES, 60 + size // BYTES_PER_S
    command = [sys.executable, "-s", "-P", "-m", "server.start.unpickle"]
    with job.source.open("rb") as source, target.open("xb") as file:
        command += [str(number) for number in (file.fileno(), os.getpid(), memory, seconds)]
        process = subprocess.run(
            command,
            stdin=source,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment(),
            cwd="/",
            pass_fds=(file.fileno(),),
            timeout=WAIT * seconds,
            check=False,
        )
    try:
        error = json.loads(process.stdout[:MAX_REPLY]).get("error")
    except (ValueError, AttributeError):
        error = (
            f"the process that reads it ended with status {process.returncode} and without an answer; it may take "
            f"{memory:,} bytes of memory and {seconds:,} s of processor time"
        )
    if error is not None:
        raise ConfigError(f"{job.source}: {error}; nothing was written")
    read_header(target)  # whatever the process wrote
    return Job(target, job.target)


def index_of(folder: Path, made: list[Job], place: Path) -> list[Job]:
    """The index of numbered files, if there are some."""
    shards = {job.target.name: read_header(job.source) for job in made if NUMBERED.fullmatch(job.target.name)}
    index = folder / INDEX
    if not shards or os.path.lexists(index):
        return []
    weight_map: dict[str, str] = {}
    for name, tensors in shards.items():
        if double := weight_map.keys() & tensors:
            raise ConfigError(
                f"{folder}: {name} and {weight_map[min(double)]} both hold {min(double)}; nothing was written"
            )
        weight_map |= dict.fromkeys(tensors, name)
    total = sum(info.num_bytes for tensors in shards.values() for info in tensors.values())
    written = place / INDEX
    written.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2))
    return [Job(written, index)]


def named(job: Job) -> None:
    """Give a file its name, unless the name is taken."""
    try:
        os.link(job.source, job.target)
    except OSError as error:
        if error.errno not in NO_LINKS or os.path.lexists(job.target):
            raise
        job.source.rename(job.target)


def publish(made: list[Job], say: Say) -> None:
    """Give the complete files their names; a name that another process took meanwhile is never overwritten."""
    done: list[Path] = []
    try:
        for job in made:
            named(job)
            done.append(job.target)
    except OSError:
        for path in done:
            path.unlink(missing_ok=True)
        raise
    for job in made:
        say(f"wrote {job.target}, {job.target.stat().st_size:,} bytes")
