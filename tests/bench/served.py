"""The server of gpu_serve: `python -m server` in a separate process that records times, and plain requests to it.

The server's loop records a heartbeat and the times at which tokens were written (tests/bench/watched.py). These records
are read after the server has stopped. CPU times are the kernel's, by thread.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench.shapes import POOLED, SHAPES, write_folder

COUNTED = ("prefix_cache_hits", "prefix_cache_queries", "steps", "steps_in_python")


class Server:
    """A server, and its process's CPU times. `beats` and `written` of watched.py are set after its stop."""

    def __init__(
        self,
        shape: str,
        device: str,
        folder: Path,
        flags: Sequence[str],
        beat_s: float,
        weights: str = "",
        module: str = "tests.bench.watched",
        checkout: Path | None = None,
    ) -> None:
        """`module`: what runs the server; `checkout`: another folder with the repository, which runs it."""
        model = write_folder(folder / f"dummy-{shape}", (SHAPES | POOLED)[shape], weights)
        begun = time.perf_counter()
        self._noted = folder / "noted.npz"
        command = [sys.executable, "-m", module, str(self._noted), str(beat_s)]
        command += ["--model", str(model)]
        command += ["--load-format", "dummy", "--device", device, "--host", "127.0.0.1", "--port", "0"]
        command += ["--disable-access-log", "--log-level", "debug", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=checkout)
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("Listening on "):
                break
            print(line, end="", flush=True)
        else:
            with self.process:
                raise RuntimeError("the server did not start")
        self.port = int(line.rsplit(":", 1)[1])
        self.ready_s = time.perf_counter() - begun
        self.beats = np.zeros((0, 2))  # [count, 2]: time, lateness
        self.written = np.zeros((0, 3))  # [count, 3]: time, seconds since the tokens were on the host, tokens

    def cpu(self) -> tuple[float, float]:
        """CPU seconds of the loop's thread, and of all threads."""
        pid = self.process.pid
        return cpu_of(Path(f"/proc/{pid}/task/{pid}")), cpu_of_process(pid)

    def counted(self) -> tuple[float, ...]:
        """Counts since start: tokens found in the prefix cache, tokens looked up, steps, and steps run by Python."""
        lines = [line.rpartition(" ") for line in ask(self.port, "/metrics").splitlines()]
        counts = {name.partition("{")[0]: float(value) for name, _, value in lines if name and name[0] != "#"}
        return tuple(counts[f"vllm:{name}_total"] for name in COUNTED)

    def stop(self) -> None:
        """Stops the server, and reads its records."""
        with self.process:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(40)
            except subprocess.TimeoutExpired:
                self.process.kill()
        if self._noted.is_file():
            with np.load(self._noted) as noted:
                self.beats, self.written = noted["beats"], noted["written"]


def cpu_of_process(pid: int) -> float:
    """CPU seconds of all threads of a process."""
    return sum(map(cpu_of, Path(f"/proc/{pid}/task").iterdir()))


def cpu_of(task: Path) -> float:
    """CPU seconds of a thread: exact if the kernel has schedstat, else in ticks."""
    try:
        return int((task / "schedstat").read_text().split()[0]) / 1e9
    except (OSError, ValueError, IndexError):
        pass
    try:
        fields = (task / "stat").read_text().rpartition(")")[2].split()
    except OSError:  # the thread has ended
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def ask(port: int, path: str, body: dict[str, Any] | None = None) -> str:
    """Sends one request (without a body: GET); returns its whole answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        data = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, data, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read().decode()
        if answer.status != 200:
            raise RuntimeError(f"{path}: {answer.status} {text[:600]}")
        return text
    finally:
        connection.close()


def check(port: int) -> None:
    """Chat and completion, whole and streamed, of text and of ids, give consistent answers."""
    rules = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    messages = [{"role": "user", "content": "Say something."}]
    # Different salts prevent cache hits, which change shapes and last bits; random weights amplify the change.
    said = json.loads(ask(port, "/v1/chat/completions", {"messages": messages, "cache_salt": "whole", **rules}))
    streamed = ask(port, "/v1/chat/completions", {"messages": messages, "stream": True, "cache_salt": "parts", **rules})
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
    assert streamed.rstrip().endswith("data: [DONE]")
    assert text == said["choices"][0]["message"]["content"], (text, said)
    for prompt in ("Once upon a time", [400, 500, 600]):
        whole = json.loads(ask(port, "/v1/completions", {"prompt": prompt, **rules}))
        assert whole["usage"]["completion_tokens"] == 8, whole
