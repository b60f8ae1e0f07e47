"""The order of engine/loop over the stand-in runtime: in Python, and with SteadyLoop for most of the turns.

Both run one script of arrivals and aborts, each tied to the number of the step before which it happens. The stand-in
runtime wakes the inbox when the step before that is launched, so that the loop returns exactly there.
"""

import contextlib
import os

import numpy as np

from _fast.ring import OutputRing
from _fast.scheduler import Scheduler
from _fast.steady import REASON_FREED, REASON_IDLE, REASON_INBOX, REASON_INVALID, REASON_PYTHON, REASON_RING, SteadyLoop
from tests.fast.oracles.runtime import Rig, seed_words

ROWS, TOKENS, SLOTS, ERROR, EOS = 6, 64, 12, 5, 3


class Engine:
    """The order of engine/loop with two steps in flight. News are kept as (step, ids, tokens, finishes, firsts)."""

    def __init__(self, script, vocab=40, **settings):
        defaults = {"max_slots": SLOTS, "max_rows": ROWS, "max_tokens": TOKENS, "max_model_len": 128, "block_size": 4}
        self.scheduler = Scheduler(**{**defaults, "num_blocks": 60, **settings})
        rows = self.scheduler.max_rows
        self.rig = Rig(rows, self.scheduler.max_tokens, 1 << 12, self.scheduler.max_slots)
        self.rig.lib.set_vocab(vocab)
        self.special = np.zeros(self.scheduler.max_slots, np.uint8)
        self.script = list(script)  # (step, what, number, details), by step
        self.live = {}  # number -> slot
        self.news = []
        self.previous = None  # index of the plan in flight

    # What arrives.

    def due(self, idle=False):
        """Does what the script has for the next step; when nothing runs, whatever comes first."""
        self.happen(self.scheduler.next_step, idle)

    def happen(self, step, idle=False):
        """Does what the script has up to this step."""
        while self.script and (self.script[0][0] <= step or idle):
            idle = False
            _, what, number, details = self.script.pop(0)
            if what == "add":
                length, most, flags = details
                prompt = (np.arange(length) * 7 % 11).astype(np.int32)
                slot = self.scheduler.add(number, prompt, max_tokens=most, eos_ids=[EOS])
                if slot >= 0:
                    self.rig.params.stage(slot, seed_words(slot, length, number))
                    self.special[slot] = flags
                    self.live[number] = slot
            elif number in self.live:
                assert self.scheduler.abort(number)
                del self.live[number]
                self.forget()

    def forget(self):
        for slot in self.scheduler.freed_slots[: self.scheduler.num_freed]:
            self.rig.params.forget(slot)

    # A step, in its parts.

    def plan(self):
        index = self.scheduler.next_step % len(self.rig.plans)
        self.rig.launcher.claim(index)
        return index if self.scheduler.schedule(self.rig.plans[index]) else None

    def launch(self, index):
        plan, launcher = self.rig.plans[index], self.rig.launcher
        self.rig.params.pack(plan)
        launcher.prep(plan, index)
        size = launcher.pick(plan.num_decode_rows != plan.num_rows, plan.num_tokens)
        if size:
            launcher.forward(plan.num_decode_rows != plan.num_rows, size)
        if plan.num_sampled:
            launcher.sample(launcher.pick_sample(plan.num_sampled))
        launcher.finish()

    def settle(self, index, wait=True):
        plan = self.rig.plans[index]
        if wait:
            assert self.rig.launcher.wait(index, 5.0)
        tokens = self.rig.ring[index][: plan.num_rows]
        sampled = (np.asarray(plan.row_flags)[: plan.num_rows] & 1).astype(bool)
        override = np.where(sampled & (tokens < 0), ERROR, 0).astype(np.int32)
        firsts = self.firsts(plan)
        self.scheduler.commit(plan, tokens, override)
        self.forget()
        self.tell(self.read(plan, firsts))

    def firsts(self, plan):
        """Before the commit: row -> cached prompt tokens, where the row's token will be its request's first."""
        found = {}
        for row in range(plan.num_rows):
            facts = self.scheduler.seqs.snapshot(plan.row_slot[row])
            if plan.row_flags[row] & 1 and plan.row_computed[row] + plan.row_len[row] == facts["prompt_len"]:
                found[row] = max(0, facts["cached"])
        return found

    def read(self, plan, firsts):
        told = (plan.step_id, [], [], [], {})
        for row in range(plan.num_rows):
            number, token, finish = plan.out_request[row], plan.out_token[row], plan.out_finish[row]
            if token >= 0 or finish:
                if row in firsts:
                    told[4][len(told[1])] = firsts[row]
                for column, value in zip(told[1:4], (number, token, finish)):
                    column.append(value)
        return told

    def tell(self, told):
        self.hear(told)

    def hear(self, told):
        self.news.append(told)
        for number, finish in zip(told[1], told[3]):
            if finish:
                del self.live[number]

    def turn(self):
        """One turn in Python. False: there was nothing to do."""
        index = self.plan()
        if index is None and self.previous is None:
            return False
        if index is not None:
            self.launch(index)
        if self.previous is not None:
            self.settle(self.previous)
        self.previous = index
        return True

    def run(self):
        while True:
            self.due()
            if not self.turn():
                if not self.script:
                    break
                self.due(idle=True)
        assert self.rig.fault == 0
        assert not self.live
        assert self.scheduler.ledger()["slots"] == self.scheduler.ledger()["in_flight"] == 0
        return self.news


class Mixed(Engine):
    """The same with SteadyLoop, and Python for a share of the turns; news pass through the ring."""

    def __init__(self, script, *, entries=64, python=0.2, seed=0, **settings):
        super().__init__(script, **settings)
        self.ring = OutputRing(self.scheduler.max_rows, entries)
        self.wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.steady = SteadyLoop(
            self.scheduler, self.rig.plans, self.rig.params, self.rig.launcher, self.ring, self.special, self.wake
        )
        self.rng = np.random.default_rng(seed)
        self.python = python
        self.reasons = dict.fromkeys(range(1, 7), 0)

    def tell(self, told):
        self.ring.put(told)

    def drain(self):
        self.ring.acknowledge()
        while (told := self.ring.pop()) is not None:
            self.hear((told[0][0], *told[1:]) if isinstance(told[0], tuple) else told)

    def due(self, idle=False):
        self.drain()
        super().due(idle)
        with contextlib.suppress(BlockingIOError):  # it may have returned for another reason just then
            os.eventfd_read(self.wake)

    def turn(self):
        steady = self.steady
        plain = self.previous is None or steady.is_plain(self.rig.plans[self.previous])
        if not plain or self.rng.random() < self.python:
            return super().turn()
        self.rig.lib.set_wake(self.wake, self.script[0][0] - self.scheduler.next_step if self.script else 0)
        reason = steady.run(-1 if self.previous is None else self.previous)
        self.rig.lib.set_wake(self.wake, 0)
        self.reasons[reason] += 1
        return self.follow(reason)

    def follow(self, reason):
        steady = self.steady
        assert (steady.waited >= 0) == (reason == REASON_INVALID)
        assert (steady.undelivered >= 0) == (reason == REASON_RING)
        assert (steady.planned >= 0) == (reason == REASON_PYTHON)
        assert not steady.freed or reason in (REASON_FREED, REASON_RING)
        if reason == REASON_INBOX:
            assert self.scheduler.next_step == self.script[0][0]
        if steady.waited >= 0:
            self.settle(steady.waited, wait=False)
        if steady.undelivered >= 0:
            plan = self.rig.plans[steady.undelivered]
            assert steady.numbers[:3] == (plan.step_id, plan.num_rows, plan.num_tokens)
            self.tell(self.read(plan, {row: cached for row, cached in enumerate(steady.cached) if cached >= 0}))
        if steady.freed:
            self.forget()
        self.previous = steady.in_flight if steady.in_flight >= 0 else None
        if steady.planned >= 0:
            assert not steady.is_plain(self.rig.plans[steady.planned])
            self.launch(steady.planned)
            if self.previous is not None:
                self.settle(self.previous)
            self.previous = steady.planned
        return reason != REASON_IDLE

    def close(self):
        self.drain()
        self.ring.close()
        os.close(self.wake)


def script_of(seed, length=120, flags=(0, 0, 0, 0, 1, 2), most=30):
    """Arrivals and aborts at random steps."""
    rng = np.random.default_rng(seed)
    step, number, script = 0, 0, []
    for _ in range(length):
        step += int(rng.integers(0, 5))
        if number and rng.random() < 0.15:
            script.append((step, "abort", int(rng.integers(0, number)), None))
        else:
            details = int(rng.integers(1, 90)), int(rng.integers(1, most)), int(rng.choice(flags))
            script.append((step, "add", number, details))
            number += 1
    return script


def both(script, faulty=-1, eager=0, **options):
    """What the plain order told and what the mixed one did, and the latter's engine."""
    settings = {name: options.pop(name) for name in ("num_blocks", "vocab") if name in options}
    plain = Engine(script, **settings)
    plain.rig.lib.set_faulty_step(faulty)
    expected = plain.run()
    mixed = Mixed(script, **settings, **options)
    mixed.rig.lib.set_eager(eager)
    mixed.rig.lib.set_faulty_step(faulty)
    mixed.run()
    mixed.close()
    return [told for told in expected if told[1]], [told for told in mixed.news if told[1]], mixed


def steady_case(most=100, prompts=(5,), entries=4096, flags=0, vocab=1 << 30, **settings):
    settings = {"max_model_len": 1 << 14, "num_blocks": 1 << 13, "max_slots": 8, **settings}
    script = [(0, "add", number, (length, most, flags)) for number, length in enumerate(prompts)]
    mixed = Mixed(script, entries=entries, python=0.0, vocab=vocab, **settings)
    mixed.due()
    return mixed
