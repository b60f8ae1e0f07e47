"""AdapterFiles: the two files of an adapter's folder, open, and read once from beginning to end.

Owner: the thread of the pool that loads the adapter. In: a folder. Out: the bytes of the configuration, the tensors in
file order, and the SHA-256 of the bytes that were read: a file that changes meanwhile gets the hash of what was used.
Files are opened through the folder's descriptor, so that a folder that is replaced meanwhile changes nothing.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from engine.base.errors import AdapterError, ConfigError
from engine.lora.config import CONFIG, MAX_CONFIG_BYTES
from engine.lora.source import Source
from engine.lora.texts import Read
from engine.weights.files import ADAPTER, DTYPES, TensorInfo, header_of

PICKLE = "adapter_model.bin"
CHUNK = 1 << 24  # bytes that are read and hashed at once
OPEN = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # O_NONBLOCK: opening a pipe must not wait for its writer


class AdapterFiles:
    """An open adapter."""

    __slots__ = ("_file", "_hash", "config", "side", "tensors")

    def __init__(self, config: bytes, file: io.FileIO, tensors: dict[str, TensorInfo], side: Read) -> None:
        self.config = config
        self.tensors = tensors  # in file order
        self.side = side  # reads another file of the folder
        self._file = file
        self._hash = hashlib.sha256()

    def read(self) -> Iterator[tuple[str, Tensor]]:
        """Name and tensor, in file order; a tensor is valid until the next is asked for."""
        self._file.seek(0)
        room = bytearray(max((info.num_bytes for info in self.tensors.values()), default=0))
        begin = next((info.begin for info in self.tensors.values()), 0)
        header = self._take(memoryview(bytearray(begin)))
        assert header == begin
        for name, info in self.tensors.items():
            view = memoryview(room)[: info.num_bytes]
            self._take(view)
            yield name, torch.frombuffer(view, dtype=DTYPES[info.dtype]).view(info.shape)

    @property
    def sha256(self) -> bytes:
        """Of the whole weights file, once `read` has ended; 32 bytes."""
        return self._hash.digest()

    def _take(self, view: memoryview) -> int:
        """Fills and hashes `view` with the next bytes of the file."""
        for start in range(0, len(view), CHUNK):
            part = view[start : start + CHUNK]
            if self._file.readinto(part) != len(part):
                raise AdapterError(f"{ADAPTER} became shorter while it was read; load it again")
            self._hash.update(part)
        return len(view)


@contextmanager
def opened(source: Source, name: str) -> Iterator[AdapterFiles]:
    """The files of an adapter, in the folder or in its subfolder `name`; AdapterError if they are not there."""
    try:
        with ExitStack() as stack:
            folder = _folder(source, stack)
            follow = not source.beneath
            config = _open(folder, CONFIG, follow, stack)
            if config is None and (inner := _inner(folder, name, stack)) is not None:
                folder, config = inner, _open(inner, CONFIG, follow, stack)
            if config is None:
                raise AdapterError(f"the folder has no {CONFIG}, so it is no adapter in PEFT's format", missing=True)
            data = config.read(MAX_CONFIG_BYTES + 1)
            if len(data) > MAX_CONFIG_BYTES:
                raise AdapterError(f"{CONFIG} has more than {MAX_CONFIG_BYTES} bytes")
            file = _open(folder, ADAPTER, follow, stack)
            if file is None:
                raise AdapterError(_instead(os.listdir(folder)))
            yield AdapterFiles(data, file, header_of(file, Path(ADAPTER)), partial(_side, folder, follow))
    except AdapterError:
        raise
    except ConfigError as error:
        raise AdapterError(str(error)) from None
    except OSError as error:
        raise AdapterError(f"the folder cannot be read ({error.strerror})") from None


def _folder(source: Source, stack: ExitStack) -> int:
    """A descriptor of the folder; below `beneath`, no component may be a symbolic link."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    try:
        if not source.beneath:
            return _closed(stack, os.open(source.folder, flags))
        folder = _closed(stack, os.open(source.beneath, flags))
        for part in _below(source):
            folder = _closed(stack, os.open(part, flags | os.O_NOFOLLOW, dir_fd=folder))
        return folder
    except (OSError, ValueError):
        raise AdapterError("there is no such folder", missing=True) from None


def _below(source: Source) -> tuple[str, ...]:
    """The components of a path below `beneath`."""
    path = Path(source.folder)
    for base in (source.beneath, os.path.realpath(source.beneath)):
        if path.is_absolute() and path.is_relative_to(base):
            path = path.relative_to(base)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise AdapterError("the path is not below the folder of --lora-dir", missing=True)
    return path.parts


def _inner(folder: int, name: str, stack: ExitStack) -> int | None:
    """The subfolder of a named adapter; PEFT saves adapters that are not named `default` there."""
    if not name or "/" in name or name in (".", ".."):
        return None
    try:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        return _closed(stack, os.open(name, flags, dir_fd=folder))
    except OSError:
        return None


def _closed(stack: ExitStack, descriptor: int) -> int:
    """The descriptor, which closes with `stack`."""
    stack.callback(os.close, descriptor)
    return descriptor


def _open(folder: int, name: str, follow: bool, stack: ExitStack) -> io.FileIO | None:
    """A regular file of the folder; None: there is none. `follow`: the hub's cache has links to files."""
    try:
        descriptor = os.open(name, OPEN if follow else OPEN | os.O_NOFOLLOW, dir_fd=folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise AdapterError(f"{name} cannot be opened ({error.strerror}); links are not followed here") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise AdapterError(f"{name} is no regular file")
    return stack.enter_context(io.FileIO(descriptor, "rb"))


def _side(folder: int, follow: bool, name: str, most: int) -> bytes | None:
    """The bytes of another file of the folder; None: there is none, or it is larger than `most`."""
    with ExitStack() as stack:
        file = _open(folder, name, follow, stack)
        if file is None or os.fstat(file.fileno()).st_size > most:
            return None
        return file.readall()


def _instead(names: Collection[str]) -> str:
    """The error for a folder without safetensors."""
    if PICKLE in names:
        return (
            f"{PICKLE} can hold code and is never read by the server: `python -m server convert FOLDER` writes "
            f"{ADAPTER} from it"
        )
    return f"the folder has no {ADAPTER}"
