"""bench startup: the time from the start of `python -m server` until it is ready, by phase; first without compiled
kernels.

Owner: main thread; each start is a new process with the flags given here. A cold start has an empty kernel cache
(Triton's); the weights' pages are as the system has them. Phases overlap, so their sum is more than the whole.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from statistics import median

from server.bench.options import StartupOptions
from server.bench.output import finish
from server.bench.progress import Progress

PHASE = re.compile(r" start: (\S.*?)\s+([0-9.]+) s$", re.MULTILINE)
LISTENING = "Listening on "


def run(options: StartupOptions, words: list[str]) -> int:
    """The command's exit status; `words` are the server's flags."""
    try:
        found = measure(options, words)
    except RuntimeError as error:
        print(f"omniloop: {error}", file=sys.stderr)
        return 1
    return finish(options, found)


def measure(options: StartupOptions, words: list[str]) -> dict[str, float]:
    """Seconds by phase: of the first (cold) start, and the median of the later starts."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder, Progress(1 + options.runs, "starts") as progress:
        runs = []
        for at in range(1 + options.runs):
            runs.append(start(words, folder, options.timeout))
            progress.show(at + 1)
    for name in runs[0]:
        found[f"cold_{name}_s"] = runs[0][name]
        found[f"warm_{name}_s"] = median(one.get(name, 0.0) for one in runs[1:])
    return found


def start(words: list[str], cache: str, timeout: float) -> dict[str, float]:
    """Start the server once: seconds by phase; `ready` is the total. Raises RuntimeError."""
    command = ["env", f"TRITON_CACHE_DIR={cache}", sys.executable, "-m", "server", *words]
    command += ["--host", "127.0.0.1", "--port", "0", "--log-level", "debug"]
    begun = time.perf_counter()
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        with process:
            assert process.stdout is not None
            watch = threading.Timer(timeout, process.kill)
            watch.start()
            try:
                ready = next((line for line in process.stdout if line.startswith(LISTENING)), "")
                took = time.perf_counter() - begun
                process.send_signal(signal.SIGTERM)
                process.wait(60)
            finally:  # Ctrl-C ends the server too
                watch.cancel()
                process.kill()
        log.seek(0)
        text = log.read()
    if not ready:
        raise RuntimeError(f"the server did not start within {timeout:g} s; it said:\n{text[-2000:]}")
    return {"ready": took, **{name: float(seconds) for name, seconds in PHASE.findall(text)}}
