"""From README's first lines to the printed answer: `python -m tests.docs.from_readme [pip] [make]`.

Owner: the main thread of a process of its own. In: README.md, which is read here, and the files that git tracks. Each
way gets a clean copy of them in a new folder, runs the lines of its block as they stand, waits for "Listening on", asks
README's question with README's command and compares the answer with the one that README shows. Docker is not tried.
Only the port is another one, so that a server which runs on this machine is left alone.
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
    """The lines of a way."""
    (code,) = (code for code in WAYS if code.startswith("make") == (way == "make"))
    return code.splitlines()


def copy_checkout(folder: Path) -> None:
    """The files that git tracks, as they are now."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    packed = subprocess.run(["tar", "-c", "--null", "-T", "-"], cwd=ROOT, input=names, capture_output=True, check=True)
    subprocess.run(["tar", "-x"], cwd=folder, input=packed.stdout, check=True)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def serving(line: str, folder: Path, port: int) -> subprocess.Popen[str]:
    """Starts the last line of a way, and waits until it listens."""
    line = f"make serve PORT={port}" if line == "make serve" else f"{line} --port {port}"
    # A group of its own: make's child is the server.
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
    """One way, from a clean checkout to the answer."""
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
