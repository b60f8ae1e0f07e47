"""A server as a user starts it: `python -m server` in a separate process, observed from outside.

`ServerProcess` starts the server on a free port, waits for `Listening on`, counts the process's resources through
/proc, and stops it with SIGTERM. A clean stop has status 0 and no traceback in the log.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
START_S, STOP_S = 120.0, 90.0  # generous for a busy machine; test_start.py measures the promised times
SMALL = (
    *("--num-threads", "1", "--max-num-seqs", "64", "--max-num-batched-tokens", "512"),
    *("--num-gpu-blocks-override", "1024", "--disable-access-log", "--max-queue-wait", "0"),
)


class ServerProcess:
    """`flags` follow --host and --port; `cwd` and `env` select the copy of the package that runs."""

    def __init__(self, *flags: str, cwd: Path = ROOT, env: dict[str, str] | None = None, port: int = 0) -> None:
        self.command = [sys.executable, "-m", "server", *flags]
        if "--uds" not in flags:
            self.command += ["--host", "127.0.0.1", "--port", str(port)]
        self.cwd = cwd
        self.env = {**os.environ, **(env or {})}
        self.port = port
        self.listening = ""  # the address in the line `Listening on`
        self.ready_s = 0.0
        self.returncode: int | None = None
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by close()
        self._popen: subprocess.Popen[str] | None = None
        self._printed: list[str] = []
        self._reader: threading.Thread | None = None
        self._ready = threading.Event()

    @property
    def pid(self) -> int:
        assert self._popen is not None
        return self._popen.pid

    @property
    def alive(self) -> bool:
        return self._popen is not None and self._popen.poll() is None

    @property
    def log(self) -> str:
        """The process's stderr so far."""
        self._log.seek(0)
        return self._log.read()

    def spawn(self) -> ServerProcess:
        """Starts the process; `wait_ready` waits for it."""
        self._begun = time.perf_counter()
        self._popen = subprocess.Popen(
            self.command, stdout=subprocess.PIPE, stderr=self._log, text=True, cwd=self.cwd, env=self.env
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def _read(self) -> None:
        assert self._popen is not None
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            self._printed.append(line)
            if found := re.match(r"Listening on (\S+)", line):
                self.listening = found.group(1)
                self.ready_s = time.perf_counter() - self._begun
                if "unix:" not in self.listening:
                    self.port = int(self.listening.rsplit(":", 1)[1])
                self._ready.set()
        self._ready.set()  # the process has ended before it was ready

    def wait_ready(self, timeout: float = START_S) -> ServerProcess:
        self._ready.wait(timeout)
        if not self.listening:
            self.kill()
            raise AssertionError(f"not ready; printed {self._printed}, log:\n{self.log}")
        return self

    def signal(self, number: int = signal.SIGTERM) -> None:
        assert self._popen is not None
        self._popen.send_signal(number)

    def wait(self, timeout: float = STOP_S) -> int:
        """Waits for the process to end; returns its exit status."""
        assert self._popen is not None
        try:
            self.returncode = self._popen.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"did not end in {timeout} s; log:\n{self.log}") from None
        return self.returncode

    def stop(self) -> None:
        """Sends SIGTERM; fails unless the process ends with status 0 and a clean log."""
        self.signal()
        status = self.wait()
        assert status == 0, f"status {status}; log:\n{self.log}"
        self.check_log()

    def check_log(self) -> None:
        log = self.log
        for word in ("Traceback", "never awaited", "was destroyed but it is pending", "omniloop.fault"):
            assert word not in log, log

    def kill(self) -> None:
        assert self._popen is not None
        with contextlib.suppress(ProcessLookupError):
            self._popen.kill()
        self._popen.wait()

    def close(self) -> None:
        """Kills the process if it still runs, and releases all its files."""
        if self._popen is not None:
            if self._popen.poll() is None:
                self.kill()
            if self._reader is not None:
                self._reader.join(60)
            assert self._popen.stdout is not None
            self._popen.stdout.close()
        self._log.close()

    def descriptors(self) -> Counter[str]:
        """Open descriptors by kind of target: socket, anon_inode, pipe, file."""
        found: Counter[str] = Counter()
        folder = Path(f"/proc/{self.pid}/fd")
        for entry in os.listdir(folder):
            with contextlib.suppress(OSError):
                found[re.split(r"[:/]", os.readlink(folder / entry))[0] or "file"] += 1
        return found

    def cpu_seconds(self) -> float:
        """CPU seconds of all threads of the process."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def threads(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/task"))

    def children(self) -> list[str]:
        return Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()


@contextlib.contextmanager
def serving(*flags: str, cwd: Path = ROOT, env: dict[str, str] | None = None) -> Iterator[ServerProcess]:
    """A ready server; at the end of the block SIGTERM must end it cleanly."""
    process = ServerProcess(*flags, cwd=cwd, env=env).spawn()
    try:
        yield process.wait_ready()
        if process.returncode is None:
            process.stop()
    finally:
        process.close()
