"""A hostile client and its neighbour, over blocking sockets: they measure what an attack costs server and clients.

`Neighbour` is a thread that requests /health/live on its own connection, and records the longest time to an answer.
`peak` measures the memory that a server process takes during a block, by the kernel's high-water mark.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROBE = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
MIB = 1 << 20
GAP_S = 0.05 if Path("/proc/self/schedstat").is_file() else 0.5  # longest answer time of a neighbour
HERE, STOLEN = 0, -1


def dial(port: int, timeout: float = 20.0, source: str = "127.0.0.1") -> socket.socket:
    """A connection from an address of this machine."""
    return socket.create_connection(("127.0.0.1", port), timeout, source_address=(source, 0))


def status_of(head: bytes) -> int:
    return int(head.split(b" ", 2)[1]) if head.startswith(b"HTTP/1.1 ") else 0


def answer(link: socket.socket) -> tuple[int, bytes]:
    """Status and content of one answer with a Content-Length; (0, b"") if the server has closed the connection."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = link.recv(65536)
        if not piece:
            return 0, data
        data += piece
    head, _, content = data.partition(b"\r\n\r\n")
    sizes = [int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    while sizes and len(content) < sizes[0]:
        piece = link.recv(65536)
        if not piece:
            break
        content += piece
    return status_of(head), content


def ask(port: int, method: str, path: str, body: Any = None, headers: str = "", **named: Any) -> tuple[int, bytes]:
    """Sends one request; `body` is bytes, or any JSON value."""
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    kind = "Content-Type: application/json\r\n" if data and "content-type" not in headers.lower() else ""
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{kind}{headers}"
    with dial(port, **named) as link:
        link.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        return answer(link)


class Neighbour:
    """Sends requests until the block ends. `slowest` is the longest time from a request to its answer, in seconds.

    The machine has few cores, and other processes use them. So time in which threads waited for a core is subtracted,
    if the kernel reports it. Three waits count: of this thread, of the server's loop, and the longest wait of the
    server's other threads, as that thread may have held the GIL. Time taken by the hypervisor is subtracted too.
    """

    def __init__(self, port: int, pid: int) -> None:
        self.slowest = 0.0
        self.answers = 0
        self._port, self._pid = port, pid
        self._over = threading.Event()
        self._asked = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)

    def _ask(self) -> None:
        with dial(self._port) as link:
            while not self._over.is_set():
                before = self._waited()
                begun = time.perf_counter()
                link.sendall(PROBE)
                assert answer(link)[0] == 200
                took = time.perf_counter() - begun
                if took > self.slowest:
                    self.slowest = max(self.slowest, took - self._waited_since(before))
                self.answers += 1
                self._asked.set()
                time.sleep(0.002)

    def _waited(self) -> dict[int, float]:
        """Thread id -> seconds waited for a core. HERE: this thread; STOLEN: time taken by the hypervisor."""
        found = {HERE: waited(f"/proc/self/task/{threading.get_native_id()}"), STOLEN: stolen()}
        return found | {
            int(name): waited(f"/proc/{self._pid}/task/{name}") for name in os.listdir(f"/proc/{self._pid}/task")
        }

    def _waited_since(self, before: dict[int, float]) -> float:
        since = {number: seconds - before.get(number, seconds) for number, seconds in self._waited().items()}
        counted = [since.pop(number) for number in (HERE, STOLEN, self._pid)]
        return sum(counted) + max(since.values(), default=0.0)

    def __enter__(self) -> Neighbour:
        self._thread.start()
        assert self._asked.wait(20)
        self.slowest = 0.0
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join(30)
        assert not self._thread.is_alive(), "the neighbour has no answer"


def waited(task: str) -> float:
    """Seconds in which a thread was ready to run and had no core."""
    try:
        return int(Path(task, "schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):  # the thread has ended, or the kernel does not count this time
        return 0.0


def stolen() -> float:
    """Seconds in which the hypervisor gave this machine's cores to other machines."""
    with open("/proc/stat", encoding="ascii") as numbers:
        return int(numbers.readline().split()[8]) / os.sysconf("SC_CLK_TCK")


@dataclass
class Peak:
    """`grown`: bytes above the process's memory at the start."""

    grown: int = 0


@contextlib.contextmanager
def peak(pid: int) -> Iterator[Peak]:
    """Measures the memory that a process takes in this block."""
    found = Peak()
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # resets the high-water mark to the resident memory
    before = resident(pid, "VmRSS")
    yield found
    found.grown = resident(pid, "VmHWM") - before


def resident(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) << 10
    raise AssertionError(f"no {name}")


def open_socket(port: int, headers: str = "", source: str = "127.0.0.1") -> socket.socket:
    """The accepted WebSocket of a realtime session."""
    link = dial(port, source=source)
    link.sendall(
        f"GET /v1/realtime HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n{headers}"
        "Sec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
    )
    head = b""
    while not head.endswith(b"\r\n\r\n"):  # byte by byte, as frames follow
        piece = link.recv(1)
        if not piece:
            break
        head += piece
    if status_of(head) != 101:
        link.close()
        raise AssertionError(head)
    return link


def frame(opcode: int, data: bytes = b"", last: bool = True) -> bytes:
    """A client's frame, masked with zeros."""
    size = len(data)
    length = bytes([128 | size]) if size < 126 else b"\xff" + struct.pack(">Q", size)
    return bytes([opcode | (128 if last else 0)]) + length + bytes(4) + data


def closing_code(link: socket.socket) -> int:
    """The code of the frame that closes a socket; 0 if the socket was closed without such a frame."""
    data = b""
    with contextlib.suppress(OSError):
        while piece := link.recv(65536):
            data += piece
    at = 0
    while at + 2 <= len(data):
        size, start = data[at + 1] & 127, at + 2
        if size == 126:
            size, start = int.from_bytes(data[start : start + 2], "big"), start + 2
        if data[at] & 15 == 8:
            return int.from_bytes(data[start : start + 2], "big")
        at = start + size
    return 0


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))
