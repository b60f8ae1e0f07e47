"""The host's cost of a plain decode step: SteadyLoop and the same steps in Python, with and without a busy thread.

The device is the tests' stand-in runtime, whose steps take no time, so only the host's work is measured: schedule,
pack, the calls of a launch, the wait, commit and the news. `busy` is a thread that runs Python without a pause, as a
loop with many streams nearly does, with the server's switch interval of 0.5 ms. Results are microseconds per step: the
mean over the steps, the median of the rounds. In `cold` cases a step takes 2 ms, as on a device. Whenever the thread
sleeps, a process on the same core sweeps 64 MiB, so the core's caches hold no data of the thread when it wakes up. Cold
cases are medians over the steps. In cases with drafts rows have up to 3 or 7, of which a step verifies one per row; in
cases in which the drafter rests, drafts cost more than they save.

Run: python -m tests.bench.bench_steady [--json FILE] [--steps N] [--cold] [--no-prefix-cache]
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
from engine.step.sizes import MIXED_LIMIT, line_sizes, mixed_sizes
from tests.fast.oracles.runtime import Rig, seed_words

PARTS = ("schedule", "launch", "wait", "commit")
COLD_NS = 2_000_000
LONGEST_PROMPT = 31
# Name -> (most drafts of a row, seconds that a draft makes a step longer).
DRAFTED = {"": (0, 0.0), ", 3 drafts": (3, 1e-6), ", 7 drafts": (7, 1e-6), ", drafter rests": (7, 1e-3)}
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
    """`rows` rows that have finished their prompts, with one step in flight; up to 3 runs of `steps` steps follow.

    drafts: most drafts of a row; a step verifies at most `rows` drafts. seconds: a step takes 6 ms, and so much longer
    for each draft.
    """

    def __init__(self, rows, steps, drafts=0, seconds=0.0, caching=True):
        longest = 64 + (3 * steps + 8) * min(3, 1 + drafts)
        tokens, width = max(2048, rows), drafts + 2 if drafts else 1
        self.scheduler = Scheduler(
            max_slots=rows, max_rows=rows, max_tokens=tokens, max_model_len=longest,
            num_blocks=rows * (longest // 16 + 2) + 1, block_size=16, max_lines=2 * rows, prefix_caching=caching,
        )  # fmt: skip
        self.rig = Rig(rows, tokens, 1 << 14, rows, width=width, graphs=not drafts)
        self.rig.lib.set_bare(1)
        if drafts:
            self.set_drafts(rows, seconds)
        self.ring = OutputRing(rows, steps + 8, width=width)
        self.wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        special = np.zeros(rows, np.uint8)
        watched = np.full((rows, 1), -1, np.int32)
        parts = self.rig.plans, self.rig.params, self.rig.launcher, self.ring, special, watched, self.wake
        self.steady = SteadyLoop(self.scheduler, *parts)
        for k in range(rows):
            # Rows reach the ends of their blocks at different steps.
            prompt = np.arange(LONGEST_PROMPT - k % 16, dtype=np.int32) + k
            slot = self.scheduler.add(k, prompt, max_tokens=longest, eos_ids=[1, 2], drafts=drafts)
            self.rig.params.stage(slot, seed_words(slot, len(prompt), k))
        self.previous = self.launch()
        while np.asarray(self.rig.plans[self.previous].row_computed)[:rows].min() < LONGEST_PROMPT:
            self.python_turn()
        while self.ring.pop() is not None:
            pass

    def set_drafts(self, rows, seconds):
        """Lets steps verify drafts, and the drafter rest; each variant has graphs of the engine's sizes."""
        times = 0.006 + seconds * np.arange(2 * rows + 1)
        self.scheduler.drafts.budget.set_times(times, times, np.zeros(1))
        self.scheduler.drafts.budget.let_rest(1)
        launcher = self.rig.launcher
        launcher.set_graph(GraphKind.PREP, 0, 1, 1000)
        launcher.set_graph(GraphKind.DECODE, 0, rows, 20000 + rows)
        for size in mixed_sizes(MIXED_LIMIT):
            launcher.set_graph(GraphKind.MIXED, 0, size, 30000 + size)
        for variant, resting in ((0, 100000), (1, 0)):
            launcher.set_graph(GraphKind.STEP, variant, rows, 50000 + rows + resting)
            for size in (rows, *line_sizes(rows, 2 * rows)):
                launcher.set_graph(GraphKind.SAMPLE, variant, size, 40000 + size + resting)

    def launch(self):
        index = self.scheduler.next_step % len(self.rig.plans)
        plan, launcher = self.rig.plans[index], self.rig.launcher
        self.scheduler.schedule(plan)
        self.rig.params.pack(plan)
        kind = int(plan.num_decode_rows != plan.num_rows)
        launcher.prep(plan, index)
        launcher.replay(kind, launcher.pick(kind, plan.num_tokens))
        launcher.replay(GraphKind.SAMPLE, launcher.pick(GraphKind.SAMPLE, plan.num_lines, plan.variant), plan.variant)
        launcher.finish()
        return index

    def python_turn(self):
        index = self.launch()
        plan = self.rig.plans[self.previous]
        self.rig.launcher.wait(self.previous, 10.0)
        self.scheduler.commit(plan, self.rig.ring[self.previous])
        rows = plan.num_rows
        outs = (plan.out_request, np.asarray(plan.out_token)[:: plan.width], plan.out_finish)
        columns = [np.asarray(out)[:rows].tolist() for out in outs]
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


def case(rows, way, busy, steps, rounds, drafted="", caching=True):
    """Microseconds by part, median over the rounds; `way` is a method of Decoding, `drafted` of DRAFTED."""
    found = []
    for _ in range(rounds):
        decoding = Decoding(rows, steps, *DRAFTED[drafted], caching=caching)
        found.append(while_busy(busy, getattr(decoding, way), steps))
        decoding.close()
    return {name: round(statistics.median(one[name] for one in found), 2) for name in found[0]}


def run(steps, rounds, caching):
    """Runs every case: name -> microseconds by part."""
    cases = {}
    for rows in (1, 32, 256):
        for steady in (True, False):
            for busy in (False, True):
                # With a busy thread Python waits for the GIL in every step: fewer steps are precise enough.
                count = steps if steady or not busy else max(50, steps // 5)
                name = f"{rows} rows, {'steady' if steady else 'Python'}{', busy' if busy else ''}"
                way = "in_steady" if steady else "in_python"
                cases[name] = case(rows, way, busy, count, rounds, caching=caching)
    for drafted in DRAFTED:
        if drafted:
            cases[f"256 rows, steady{drafted}"] = case(256, "in_steady", False, steps, rounds, drafted, caching)
    return cases


def run_cold(rounds, caching):
    with swept():
        kinds = [(1, ""), (32, ""), *((256, drafted) for drafted in DRAFTED)]
        return {
            f"{rows} rows, cold{drafted}": case(rows, "in_cold", False, 300, rounds, drafted, caching)
            for rows, drafted in kinds
        }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cold", action="store_true", help="only the cases whose core has done other work meanwhile")
    parser.add_argument("--no-prefix-cache", action="store_true", help="blocks get no names, as in gpu_drafts")
    options = parser.parse_args()
    caching = not options.no_prefix_cache
    sys.setswitchinterval(0.0005)
    result = run_cold(options.rounds, caching) if options.cold else run(options.steps, options.rounds, caching)
    print(f"{'case':32} {'step us':>9}" + "".join(f" {name:>9}" for name in PARTS))
    for name, parts in result.items():
        print(f"{name:32} {parts.get('step', 0):9.2f}" + "".join(f" {parts[p]:9.2f}" for p in PARTS if p in parts))
    if options.json:
        machine = {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count()}
        options.json.write_text(json.dumps({**machine, "us": result}, indent=1))


if __name__ == "__main__":
    main()
