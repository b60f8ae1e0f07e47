"""Load from a process of its own: `python -m tests.end_to_end.load PORT STREAMS SECONDS` keeps so many streams open.

Prints the number of events it has read. Light to import, so that it does not take the machine from what is measured.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time

from tests.end_to_end.wire import greedy, stream


async def keep(port: int, streams: int, seconds: float) -> int:
    """Each client sends the next request when its last one has ended."""
    until = time.monotonic() + seconds
    events = 0

    async def client(number: int) -> None:
        nonlocal events
        draw = random.Random(number)  # lengths differ, or all would end and begin together
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
