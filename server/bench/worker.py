"""A process of clients: `python -m server.bench.worker` reads its share as a line of JSON, then a start time.

Owner: `server/bench/processes`, which started it. Out, on stdout: "ready", a line with the count for each answer that
has ended, then one line with all answers. When stdin ends, the load ends and open requests are cut off.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import Callable

import orjson
import uvloop

from server.bench.options import ServeOptions
from server.bench.reply import Reply
from server.bench.share import Share


def main() -> None:
    job = orjson.loads(sys.stdin.readline())
    options = ServeOptions(**{**job["options"], "percentiles": tuple(job["options"]["percentiles"])})
    share = Share(options, job["model"], job["first"], job["step"])
    gc.collect()
    gc.freeze()  # there are many bodies; a garbage collection between two reads would be measured
    print("ready", flush=True)
    line = sys.stdin.readline()
    if not line:  # the parent process has ended
        return
    found: list[Reply] = []

    def record(answer: Reply) -> None:
        found.append(answer)
        print(len(found), flush=True)

    begun_cpu = time.process_time()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asked(share, float(line), record))
    result = {"cpu_s": time.process_time() - begun_cpu, "answers": found}
    # Under PYTHONUNBUFFERED, print drops data that does not fit into one write to the socket.
    with open(sys.stdout.fileno(), "wb", closefd=False) as out:
        out.write(orjson.dumps(result) + b"\n")


async def asked(share: Share, start: float, record: Callable[[Reply], None]) -> None:
    """Run the share's load, at most until the end of stdin."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), stop.set)
    await share.run(start, record, stop)


if __name__ == "__main__":
    main()
