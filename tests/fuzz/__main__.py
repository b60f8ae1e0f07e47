"""`python -m tests.fuzz SECONDS [TARGET ...]`: damaged inputs for SECONDS, divided among the targets; prints counts.

The first input that takes too long, or raises anything but a refusal, is written to a file; the exit status is then 1.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

from tests.fuzz.targets import MOST_S, REFUSALS, TARGETS
from tests.fuzz.test_fuzz import HOWS, ODD, damaged


def main() -> int:
    seconds, names = float(sys.argv[1]), sys.argv[2:] or list(TARGETS)
    draw = random.Random(time.time_ns())
    for name in names:
        target, count, refused = TARGETS[name], 0, 0
        pool = list(target.seeds())
        end = time.monotonic() + seconds / len(names)
        while time.monotonic() < end:
            edits = [
                (draw.randrange(1 << 20), draw.choice(HOWS), draw.choice([*ODD, draw.randbytes(draw.randint(1, 8))]))
                for _ in range(draw.randint(1, 8))
            ]
            data = damaged(draw.choice(pool), edits)
            begun = time.thread_time()
            try:
                target.call(data)
            except REFUSALS:
                refused += 1
            except Exception:
                Path("fuzz.bin").write_bytes(data)
                raise
            if time.thread_time() - begun > MOST_S:
                Path("fuzz.bin").write_bytes(data)
                print(f"{name}: {len(data)} bytes took {time.thread_time() - begun:.1f} s: fuzz.bin")
                return 1
            count += 1
            if len(pool) < 256 and len(data) < 1 << 16:
                pool.append(data)
        print(f"{name}: {count} inputs, {refused} refused, {time.process_time():.0f} s of CPU so far", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
