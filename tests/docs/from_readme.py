"""From README's first lines to the printed answer: `python -m tests.docs.from_readme [pip] [make]`.

Owner: the main thread of a separate process. In: README.md and the files that git tracks. For each way to install, a
clean copy of these files is made in a new folder. There the lines of the way's block run unchanged, until the server
prints "Listening on". Then README's command sends README's question, and the answer is compared with README's answer.
Docker is not tried. Only the port is changed, so that a server already running on this machine is not affected.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.docs.blocks import ROOT, of_page

WAYS = [code for code in of_page("README", "sh") if "curl" not in code]  # the blocks that install and serve
NAMES = ("pip", "make")


def lines_of(way: str) -> list[str]:
    """The shell lines of one way to install."""
    (code,) = (code for code in WAYS if code.startswith("make") == (way == "make"))
    return code.splitlines()


def copy_checkout(folder: Path) -> None:
    """Copies the files that git tracks, with their current content."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    packed = subprocess.run(["tar", "-c", "--null", "-T", "-"], cwd=ROOT, input=names, capture_output=True, check=True)
    subprocess.run(["tar", "-x"], cwd=folder, input=packed.stdout, check=True)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def serving(line: str, folder: Path, port: int) -> subprocess.Popen[str]:
    """Runs the last line of a way, and waits until the server listens."""
    line = f"make serve PORT={port}" if line == "make serve" else f"{line} --port {port}"
    # The process gets its own group, as the server is a child of make.
    process = subprocess.Popen(
        ["sh", "-c", f"exec {line}"], cwd=folder, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    for printed in process.stdout:
        print(printed, end="")
        if printed.startswith("Listening on"):
            return process
    raise SystemExit(f"{line}: ended with status {process.wait()}")


def content(port: int) -> str:
    """The text of the answer to README's question."""
    (question,) = (code for code in of_page("README", "sh") if "curl" in code)
    here = question.replace("localhost:8000", f"localhost:{port}")
    done = subprocess.run(["sh", "-c", here], capture_output=True, text=True, check=True)
    print(done.stdout)
    return json.loads(done.stdout)["choices"][0]["message"]["content"]


def follow(way: str) -> None:
    """Follows one way to install, from a clean checkout to the answer."""
    (shown,) = of_page("README", "json")
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        copy_checkout(folder)
        *before, last = lines_of(way)
        for line in before:
            print(f"$ {line}", flush=True)
            subprocess.run(["sh", "-c", line], cwd=folder, check=True)
        print(f"$ {last}", flush=True)
        process = serving(last, folder, port)
        try:
            found = content(port)
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
    assert found == json.loads(shown)["choices"][0]["message"]["content"]
    print(f"{way}: the answer came {time.monotonic() - begun:.0f} s after the first line")


if __name__ == "__main__":
    for each in sys.argv[1:] or NAMES:
        follow(each)
