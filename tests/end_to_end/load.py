"""Load from a separate process: `python -m tests.end_to_end.load PORT STREAMS SECONDS` keeps STREAMS streams open.

Prints the number of events read. Imports little, so that the process takes little CPU from the measured server.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time

from tests.end_to_end.wire import greedy, stream


async def keep(port: int, streams: int, seconds: float) -> int:
    """Runs the clients; each sends its next request when its last one has ended."""
    until = time.monotonic() + seconds
    events = 0

    async def client(number: int) -> None:
        nonlocal events
        draw = random.Random(number)  # lengths differ, so that streams do not all end and begin at the same time
        while time.monotonic() < until:
            got = await stream(port, "/v1/completions", greedy([5 + number] * 20, draw.randint(50, 150)))
            assert got.done, (got.status, got.error)
            events += len(got.events)

    async with asyncio.TaskGroup() as group:
        for number in range(streams):
            group.create_task(client(number))
    return events


if __name__ == "__main__":
    print(asyncio.run(keep(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))))
