"""`python -m server` with a heartbeat on its loop: `python -m tests.bench.watched FILE [flags]`, for gpu_serve.

Owner: the server's loop. A task sleeps BEAT_S again and again; when the server stops, FILE.npy holds (time, lateness)
of every beat, in seconds of perf_counter, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import sys
import time

from server import signals

signals.hold()  # as server/__main__ does, before the imports below

from server import app, cli  # noqa: E402

BEAT_S = 0.005


async def beat(path: str) -> None:
    """Until it is cancelled."""
    import numpy as np

    late: list[tuple[float, float]] = []
    try:
        while True:
            begun = time.perf_counter()
            await asyncio.sleep(BEAT_S)
            now = time.perf_counter()
            late.append((now, now - begun - BEAT_S))
    finally:
        np.save(path, np.array(late, np.float64).reshape(-1, 2))


class WatchedProcess(app.Process):
    """Beats from the moment it is ready."""

    path = ""

    async def start(self) -> None:
        await super().start()
        self.beating = asyncio.get_running_loop().create_task(beat(self.path))


if __name__ == "__main__":
    WatchedProcess.path = sys.argv[1]
    app.Process = WatchedProcess  # type: ignore[misc]
    sys.exit(cli.main(sys.argv[2:]))
