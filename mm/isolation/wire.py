"""Wire: the messages between a server and its helpers, and how bytes pass between them.

Both sides, a thread each. Messages are msgpack in datagrams of a pair of Unix sockets, checked against their types.
Files and decoded media are anonymous memory (memfd), whose descriptors travel with the messages that name them: the
bytes are mapped instead of sent, and the memory is freed with the last process that holds it.

    server -> helper   Start                  Open(file)             Decode
    helper -> server         Ready   PlanImage .. PlanFilm   Header         Decoded(data, sound) or Refusal, Failure
    server -> helper                        Planned ..
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from mm.errors import MediaError
from mm.item import MediaOptions
from mm.limits import MediaLimits
from mm.transform.image import Scale

MESSAGE_BYTES = 1 << 17  # bytes of a datagram; a plan of some hundred frames takes a tenth
_MOST_FILES = 2  # descriptors per message
# Seals against shrinking, growing and writing. Only Linux has them, but every system imports this module.
_SEALS = sum(getattr(fcntl, f"F_SEAL_{name}", 0) for name in ("SHRINK", "GROW", "WRITE"))


class Message(msgspec.Struct, frozen=True, tag=True):
    """One datagram."""


class Start(Message, frozen=True):
    """The server's settings, and the facts about the model's processor that a helper needs."""

    limits: MediaLimits
    picture_bytes: int
    takes_audio: bool


class Ready(Message, frozen=True):
    """The helper waits for files; `filtered`: its system calls go through a filter."""

    filtered: bool


class Open(Message, frozen=True):
    """Read the header of the attached file."""

    modality: str
    container: str
    options: MediaOptions
    seconds: float  # seconds that decoding may take
    audio_max_seconds: float  # the longest sound allowed in this file
    promises: bool = False  # only report the length in the sound's header


class Promised(Message, frozen=True):
    """The length of a sound in seconds, according to its header."""

    seconds: float | None


class PlanImage(Message, frozen=True):
    """Asks to which size the processor scales a picture of this size."""

    height: int
    width: int


class PlanFilm(Message, frozen=True):
    """Asks which frames of a film the processor reads."""

    num_frames: int
    fps: float
    height: int
    width: int


class PlannedImage(Message, frozen=True):
    """The processor's answer."""

    scale: Scale


class PlannedFilm(Message, frozen=True):
    """FilmPlan without arrays."""

    indices: list[int]
    scale: Scale
    seconds_per_frame: float
    seconds: list[float] | None
    silent: bool
    total: int
    fps: float


class Header(Message, frozen=True):
    """Opened without its functions."""

    cost: int
    size: int
    faster_cost: int | None


class Decode(Message, frozen=True):
    """Decode the file whose header was read."""

    faster: bool


class Forget(Message, frozen=True):
    """The file whose header was read is not needed any more."""


class Array(msgspec.Struct, frozen=True):
    """Type and shape of decoded bytes; the attached file at the same index holds the bytes."""

    dtype: str
    shape: tuple[int, ...]


class Decoded(Message, frozen=True):
    """MediaItem: its data, and a film's sound track."""

    arrays: list[Array]
    unscaled: bool  # whether a picture has its original size
    replaced: tuple[tuple[int, int], ...]


class Refusal(Message, frozen=True):
    """A MediaError, from either side; `last`: the helper ends."""

    status: int
    reason: str
    message: str
    last: bool = False

    @classmethod
    def of(cls, error: MediaError, last: bool = False) -> Refusal:
        return cls(error.status, error.reason, error.message, last)

    def error(self) -> MediaError:
        return MediaError(self.status, self.reason, self.message)


class Failure(Message, frozen=True):
    """An error in our own code: its type, and the line."""

    where: str


ASKED: Any = Start | Open | PlannedImage | PlannedFilm | Refusal | Decode | Forget
ANSWERED: Any = Ready | Promised | PlanImage | PlanFilm | Header | Decoded | Refusal | Failure
M = TypeVar("M")


class Ended(Exception):
    """The other side has closed its end, or sent a message that cannot be decoded."""


class Link:
    """One end of a pair of sockets; `reads` is the type of the messages that the other side sends."""

    def __init__(self, end: socket.socket, reads: Any) -> None:
        self._end = end
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(reads)

    def send(self, message: Message, files: Sequence[int] = ()) -> None:
        """Send a message with descriptors, which the caller still has to close."""
        try:
            socket.send_fds(self._end, [msgspec.msgpack.encode(message)], files)
        except OSError:
            raise Ended from None

    def receive(self) -> tuple[Message, list[int]]:
        """Wait for a message; the caller closes its descriptors."""
        try:
            data, files, flags, _ = socket.recv_fds(self._end, MESSAGE_BYTES, _MOST_FILES, socket.MSG_CMSG_CLOEXEC)
        except OSError:
            raise Ended from None
        try:
            if not data or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise Ended
            return self._decoder.decode(data), files
        except BaseException as error:
            close_all(files)
            if isinstance(error, msgspec.MsgspecError):
                raise Ended from None
            raise

    def close(self) -> None:
        self._end.close()


def close_all(files: Sequence[int]) -> None:
    for file in files:
        with contextlib.suppress(OSError):
            os.close(file)


def memory_file(data: bytes | memoryview, sealed: bool = False) -> int:
    """An anonymous file in memory. `sealed`: no process can change or shorten it any more."""
    file = os.memfd_create("media", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        left = memoryview(data).cast("B")
        while left:
            left = left[os.write(file, left) :]
        if sealed:
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
        return file
    except BaseException:
        os.close(file)
        raise


def read_file(file: int) -> bytes:
    """All bytes of a memory file; the writer left its position at the end."""
    os.lseek(file, 0, os.SEEK_SET)
    with open(file, "rb", closefd=False) as opened:
        return opened.read()


def is_sealed(file: int, size: int) -> bool:
    """Whether the file has this size and cannot change it: reading a mapped file that has been shortened crashes."""
    try:
        return os.fstat(file).st_size == size and fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEALS == _SEALS
    except OSError:
        return False


def array_file(array: np.ndarray) -> tuple[Array, int]:
    """An array in a sealed file."""
    flat = np.ascontiguousarray(array)
    return Array(flat.dtype.name, flat.shape), memory_file(flat.reshape(-1).view(np.uint8).data, sealed=True)
