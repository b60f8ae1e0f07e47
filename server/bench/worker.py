"""A process of clients: `python -m server.bench.worker` reads its share as a line of JSON, then a start time.

Owner: `server/bench/processes`, which started it. Out, on stdout: "ready", a line with the count for each answer that
has ended, then one line with all answers.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time

import orjson
import uvloop

from server.bench.answer import Answer
from server.bench.load import Share
from server.bench.options import ServeOptions


def main() -> None:
    job = orjson.loads(sys.stdin.readline())
    options = ServeOptions(**{**job["options"], "percentiles": tuple(job["options"]["percentiles"])})
    share = Share(options, job["model"], job["first"], job["step"])
    gc.collect()
    gc.freeze()  # bodies are many, and a collection between two reads would be measured
    print("ready", flush=True)
    start = float(sys.stdin.readline())
    found: list[Answer] = []

    def record(answer: Answer) -> None:
        found.append(answer)
        print(len(found), flush=True)

    begun_cpu = time.process_time()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(share.run(start, record))
    result = {"cpu_s": time.process_time() - begun_cpu, "answers": found}
    print(orjson.dumps(result).decode(), flush=True)


if __name__ == "__main__":
    main()
