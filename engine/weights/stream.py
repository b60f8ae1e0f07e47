"""Streams shards to an accelerator: several threads read chunks of the files into pinned memory, which is copied.

In: shards with checked headers. Out: every tensor on the device and added to Pieces, in the order of completion. Only
the calling thread allocates on the device and packs; readers read and send (upload.py). Memory: the weights, one part's
pieces if their dtype changes, and a ring of pinned chunks.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor

from engine.base.errors import ConfigError
from engine.weights.files import Shard
from engine.weights.pieces import Pieces
from engine.weights.upload import Upload

CHUNK_BYTES = 64 << 20
READERS = 4
SPARE = 2  # chunks in transfer while every reader reads a chunk


@dataclass(slots=True)
class Span:
    """A run of one tensor's bytes within a chunk."""

    name: str  # the tensor's name in its shard
    tensor_at: int
    chunk_at: int
    size: int


@dataclass(slots=True)
class Chunk:
    """A run of bytes of one file, and the tensors that the bytes belong to."""

    shard: Shard
    begin: int
    size: int = 0
    spans: list[Span] = field(default_factory=list)
    targets: list[Tensor] = field(default_factory=list)  # each span's bytes on the device


def chunks(shards: list[Shard], names: dict[str, str], chunk_bytes: int) -> Iterator[Chunk]:
    """The bytes of the tensors in `names`, in file order, in runs of at most `chunk_bytes`."""
    for shard in shards:
        chunk = Chunk(shard, 0)
        for name, info in shard.tensors.items():
            done = 0
            while name in names and done < info.num_bytes:
                at = info.begin + done
                if chunk.begin + chunk.size != at or chunk.size == chunk_bytes:
                    if chunk.size:
                        yield chunk
                    chunk = Chunk(shard, at)
                size = min(info.num_bytes - done, chunk_bytes - chunk.size)
                chunk.spans.append(Span(name, done, chunk.size, size))
                chunk.size += size
                done += size
        if chunk.size:
            yield chunk


class Readers:
    """Threads that read chunks and send them; a context that ends the threads on exit."""

    def __init__(self, upload: Upload, chunk_bytes: int, threads: int) -> None:
        self._upload = upload
        self._chunk_bytes = chunk_bytes
        self._asked: SimpleQueue[Chunk | None] = SimpleQueue()
        self._sent: SimpleQueue[tuple[Chunk, Any, BaseException | None]] = SimpleQueue()
        self._ring: SimpleQueue[tuple[Tensor | None, Any]] = SimpleQueue()  # pinned chunk, event of its last copies
        for _ in range(threads + SPARE):
            self._ring.put((None, None))
        self._threads = [
            threading.Thread(target=self._run, name=f"omniloop-weights-{number}", daemon=True)
            for number in range(threads)
        ]

    def __enter__(self) -> Readers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        with contextlib.suppress(Empty):
            while True:
                self._asked.get_nowait()
        for _ in self._threads:
            self._asked.put(None)
        for thread in self._threads:
            thread.join()

    def ask(self, chunk: Chunk) -> None:
        self._asked.put(chunk)

    def take(self) -> tuple[Chunk, Any]:
        """The next sent chunk and its event; raises the reader's error."""
        chunk, event, error = self._sent.get()
        if error is not None:
            raise error
        return chunk, event

    @torch.inference_mode()
    def _run(self) -> None:
        while (chunk := self._asked.get()) is not None:
            pinned, event = self._ring.get()
            try:
                if pinned is None:
                    pinned = self._upload.pinned(self._chunk_bytes)
                if event is not None:
                    event.synchronize()  # the copies out of this pinned chunk are done
                read_exactly(chunk.shard.path, chunk.begin, pinned.numpy()[: chunk.size].data)
                sources = [pinned[span.chunk_at : span.chunk_at + span.size] for span in chunk.spans]
                event = self._upload.send(list(zip(chunk.targets, sources)))
                self._sent.put((chunk, event, None))
            except BaseException as error:
                self._sent.put((chunk, None, error))
            self._ring.put((pinned, event))


def read_exactly(path: Path, begin: int, room: memoryview) -> None:
    """Fills `room` from the file, without the GIL."""
    try:
        with path.open("rb", buffering=0) as file:
            if hasattr(os, "posix_fadvise"):  # the kernel prefetches the whole chunk
                os.posix_fadvise(file.fileno(), begin, len(room), os.POSIX_FADV_WILLNEED)
            done = 0
            while done < len(room):
                count = os.preadv(file.fileno(), [room[done:]], begin + done)
                if count == 0:
                    raise ConfigError(f"{path} has become shorter while it was read; download the checkpoint again")
                done += count
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


def stream(
    shards: list[Shard],
    names: dict[str, str],
    pieces: Pieces,
    upload: Upload,
    report: Callable[[int], None],
    chunk_bytes: int = CHUNK_BYTES,
    threads: int = READERS,
) -> None:
    """Loads every tensor of `names` (name in the shard -> canonical name); calls `report` with each chunk's bytes."""
    largest = max((chunk.size for chunk in chunks(shards, names, chunk_bytes)), default=1)
    rooms: dict[str, Tensor] = {}
    left: dict[str, int] = {}

    def settle(chunk: Chunk, event: Any) -> None:
        upload.arrive(event)
        for span in chunk.spans:
            left[span.name] -= span.size
            if not left[span.name]:
                room = rooms.pop(span.name)
                arranged = chunk.shard.arranged(span.name, room)
                if arranged is not room:
                    room.copy_(arranged)
                pieces.add(names[span.name], room)
        report(chunk.size)

    open_chunks = 0
    with Readers(upload, largest, threads) as readers:
        for chunk in chunks(shards, names, chunk_bytes):
            for span in chunk.spans:
                if span.name not in rooms:
                    rooms[span.name] = pieces.room(names[span.name])
                    left[span.name] = chunk.shard.tensors[span.name].num_bytes
                flat = rooms[span.name].view(-1).view(torch.uint8)
                chunk.targets.append(flat[span.tensor_at : span.tensor_at + span.size])
            upload.begin()
            readers.ask(chunk)
            open_chunks += 1
            if open_chunks > 2 * threads:
                settle(*readers.take())
                open_chunks -= 1
        for _ in range(open_chunks):
            settle(*readers.take())
