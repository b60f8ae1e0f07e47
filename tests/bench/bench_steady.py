"""The host's cost of a plain decode step: SteadyLoop and the same steps in Python, with and without a busy thread.

The device is the tests' stand-in runtime, whose steps take no time, so only the host's work is measured: schedule,
pack, the calls of a launch, the wait, commit and the news. `busy` is a thread that runs Python without a pause, as a
loop with many streams nearly does, with the server's switch interval of 0.5 ms. Results are microseconds per step: the
mean over the steps, the median of the rounds. In `cold` cases a step takes 2 ms, as on a device. Whenever the thread
sleeps, a process on the same core sweeps 64 MiB, so the core's caches hold no data of the thread when it wakes up. Cold
cases are medians over the steps. Run: python -m tests.bench.bench_steady [--json FILE] [--steps N] [--cold]
"""

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

from _fast.layout import GraphKind
from _fast.ring import OutputRing
from _fast.scheduler import Scheduler
from _fast.steady import REASON_INBOX, SteadyLoop
from tests.fast.oracles.runtime import Rig, seed_words

PARTS = ("schedule", "launch", "wait", "commit")
COLD_NS = 2_000_000
SWEEP = """
import json, os
import numpy as np
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
memory = np.zeros(8 << 20)
print(flush=True)
while True:
    memory += 1.0
    json.loads(json.dumps({str(k): [k] for k in range(99)}))
"""


class Decoding:
    """`rows` rows that have finished their prompts, with one step in flight."""

    def __init__(self, rows, steps):
        longest = 64 + steps
        tokens = max(2048, rows)
        self.scheduler = Scheduler(
            max_slots=rows, max_rows=rows, max_tokens=tokens, max_model_len=longest,
            num_blocks=rows * (longest // 16 + 2) + 1, block_size=16,
        )  # fmt: skip
        self.rig = Rig(rows, tokens, 1 << 14, rows)
        self.rig.lib.set_bare(1)
        self.ring = OutputRing(rows, steps)
        self.wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        special = np.zeros(rows, np.uint8)
        watched = np.full((rows, 1), -1, np.int32)
        parts = self.rig.plans, self.rig.params, self.rig.launcher, self.ring, special, watched, self.wake
        self.steady = SteadyLoop(self.scheduler, *parts)
        for k in range(rows):
            # Rows reach the ends of their blocks at different steps.
            prompt = np.arange(16 + k % 16, dtype=np.int32) + k
            slot = self.scheduler.add(k, prompt, max_tokens=longest, eos_ids=[1, 2])
            self.rig.params.stage(slot, seed_words(slot, len(prompt), k))
        self.previous = self.launch()
        while self.rig.plans[self.previous].num_decode_rows < rows:
            self.python_turn()
        while self.ring.pop() is not None:
            pass

    def launch(self):
        index = self.scheduler.next_step % len(self.rig.plans)
        plan, launcher = self.rig.plans[index], self.rig.launcher
        self.scheduler.schedule(plan)
        self.rig.params.pack(plan)
        kind = int(plan.num_decode_rows != plan.num_rows)
        launcher.prep(plan, index)
        launcher.replay(kind, launcher.pick(kind, plan.num_tokens))
        launcher.replay(GraphKind.SAMPLE, launcher.pick(GraphKind.SAMPLE, plan.num_sampled))
        launcher.finish()
        return index

    def python_turn(self):
        index = self.launch()
        plan = self.rig.plans[self.previous]
        self.rig.launcher.wait(self.previous, 10.0)
        self.scheduler.commit(plan, self.rig.ring[self.previous])
        rows = plan.num_rows
        columns = [np.asarray(out)[:rows].tolist() for out in (plan.out_request, plan.out_token, plan.out_finish)]
        self.ring.put(columns)
        self.previous = index

    def in_python(self, steps):
        begun = time.perf_counter()
        for _ in range(steps):
            self.python_turn()
        return {"step": (time.perf_counter() - begun) / steps * 1e6}

    def in_steady(self, steps):
        for _ in range(2):  # the first run touches the ring's memory
            self.rig.lib.set_wake(self.wake, steps)
            before, free = self.steady.num_steps, self.steady.free_s
            reason = self.steady.run(self.previous)
            assert reason == REASON_INBOX
            self.previous = self.steady.in_flight
            os.eventfd_read(self.wake)
            made, took = self.steady.num_steps - before, self.steady.free_s - free
            told = [self.ring.pop()[0] for _ in range(made)]
        numbers = np.array(told)
        parts = {name: float(numbers[:, 10 + k].mean()) * 1e6 for k, name in enumerate(PARTS)}
        return {"step": took / made * 1e6, **parts}

    def in_cold(self, steps):
        self.in_steady(steps)  # the first run touches the ring's memory
        self.rig.lib.set_step_ns(COLD_NS)
        self.rig.lib.set_wake(self.wake, steps)
        assert self.steady.run(self.previous) == REASON_INBOX
        self.previous = self.steady.in_flight
        numbers = np.array([self.ring.pop()[0] for _ in range(len(self.ring))])[steps // 10 :]
        return {name: float(np.median(numbers[:, 10 + k])) * 1e6 for k, name in enumerate(PARTS)}

    def close(self):
        self.ring.close()
        os.close(self.wake)


def while_busy(busy, call, *args):
    """The result of a call that runs on another thread, while this thread is busy or sleeps."""
    found = []
    thread = threading.Thread(target=lambda: found.append(call(*args)))
    thread.start()
    while busy and thread.is_alive():
        for _ in range(1000):
            pass
    thread.join()
    return found[0]


@contextlib.contextmanager
def swept():
    """Pins this thread to one core; a process on the same core runs whenever this thread sleeps."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(allowed)})
    other = subprocess.Popen([sys.executable, "-c", SWEEP], stdout=subprocess.PIPE)
    other.stdout.readline()
    yield
    other.kill()
    other.wait()
    other.stdout.close()
    os.sched_setaffinity(0, allowed)


def case(rows, way, busy, steps, rounds):
    """Microseconds by part, median over the rounds; `way` is a method of Decoding."""
    found = []
    for _ in range(rounds):
        decoding = Decoding(rows, 3 * steps + 8)
        found.append(while_busy(busy, getattr(decoding, way), steps))
        decoding.close()
    return {name: round(statistics.median(one[name] for one in found), 2) for name in found[0]}


def run(steps, rounds):
    """Runs every case: name -> microseconds by part."""
    cases = {}
    for rows in (1, 32, 256):
        for steady in (True, False):
            for busy in (False, True):
                # With a busy thread Python waits for the GIL in every step: fewer steps are precise enough.
                count = steps if steady or not busy else max(50, steps // 5)
                name = f"{rows} rows, {'steady' if steady else 'Python'}{', busy' if busy else ''}"
                cases[name] = case(rows, "in_steady" if steady else "in_python", busy, count, rounds)
    return cases


def run_cold(rounds):
    with swept():
        return {f"{rows} rows, cold": case(rows, "in_cold", False, 300, rounds) for rows in (1, 32, 256)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cold", action="store_true", help="only the cases whose core has done other work meanwhile")
    options = parser.parse_args()
    sys.setswitchinterval(0.0005)
    result = run_cold(options.rounds) if options.cold else run(options.steps, options.rounds)
    print(f"{'case':26} {'step us':>9}" + "".join(f" {name:>9}" for name in PARTS))
    for name, parts in result.items():
        print(f"{name:26} {parts.get('step', 0):9.2f}" + "".join(f" {parts[p]:9.2f}" for p in PARTS if p in parts))
    if options.json:
        machine = {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count()}
        options.json.write_text(json.dumps({**machine, "us": result}, indent=1))


if __name__ == "__main__":
    main()
