"""Folder: the files of one server on a disk: a lock, records as JSON, contents.

Owner: any thread, one call for a name at a time. A record is replaced by a rename, so that a reader, or a start after a
crash, finds the old record or the new one. A second server is refused as long as the lock is held.

    FOLDER/lock   FOLDER/files/ID (content)   FOLDER/files/ID.json   FOLDER/batches/ID.json
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from engine.base.errors import ConfigError
from server.batches.records import Record

log = logging.getLogger("omniloop")
T = TypeVar("T", bound=Record)
KINDS = ("files", "batches")
NEW = ".new"  # suffix of a record that is being written


class Folder:
    """One folder; "" makes a private one, which ends with this object or the process."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._lock = -1
        self._opening = threading.Lock()  # threads of the pool may need a private folder at the same time
        self.root = Path()
        self._remove: Callable[[], object] | None = None  # removes a private folder

    @property
    def is_open(self) -> bool:
        return self._lock >= 0

    def open(self) -> None:
        """Make and lock the folder, once. Raises ConfigError."""
        with self._opening:
            if not self.is_open:
                self._open()

    def _open(self) -> None:
        try:
            self.root = Path(self._place or tempfile.mkdtemp(prefix="omniloop-files-"))
            if not self._place:
                self._remove = weakref.finalize(self, shutil.rmtree, self.root, ignore_errors=True)
            for kind in KINDS:
                (self.root / kind).mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            text = f"--files-dir {self._place}: {error.strerror}; name a folder that this user may write"
            raise ConfigError(text) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise ConfigError(
                f"--files-dir {self._place}: another server uses this folder; give each its own"
            ) from None
        self._lock = lock

    def close(self) -> None:
        """Give up the lock, and remove a private folder; later calls do nothing."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        if self._remove is not None:
            self._remove()

    def content(self, name: str) -> Path:
        """The place of a file's content."""
        return self.root / "files" / name

    def save(self, kind: str, name: str, record: Record) -> None:
        """Replace a record on the disk. Raises OSError."""
        path = self.root / kind / f"{name}.json"
        new = path.with_suffix(NEW)
        with open(new, "wb", opener=private) as file:
            file.write(msgspec.json.encode(record))
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
        sync(path.parent)

    def load(self, kind: str, record: type[T]) -> list[T]:
        """All records of a kind, without those that cannot be read."""
        found: list[T] = []
        for path in sorted((self.root / kind).iterdir()):
            if path.suffix == NEW:
                path.unlink()
            elif path.suffix == ".json":
                try:
                    found.append(msgspec.json.decode(path.read_bytes(), type=record))
                except (OSError, msgspec.MsgspecError):
                    log.warning("--files-dir: %s/%s cannot be read and is left as it is", kind, path.name)
        return found

    def remove(self, kind: str, name: str) -> None:
        """Remove a record, then its content."""
        for path in (self.root / kind / f"{name}.json", self.root / kind / name):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()


def private(path: str, flags: int) -> int:
    """An opener of files that other users cannot read."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def sync(folder: Path) -> None:
    """Bring the names of a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
