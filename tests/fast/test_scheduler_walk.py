"""Random walks of the whole scheduler with a simulated device and a reference engine (short form of R3).

Two steps are in flight. Requests arrive, are aborted or preempted, share prefixes and media, and fail with their steps.
The device (oracles/device.py) checks every read; this file checks budgets, order, endings and the ledger after each
move. The test's name contains the seed of a failing walk.
"""

import random

import numpy as np
import pytest

from _fast.plan import StepPlan
from _fast.scheduler import Scheduler
from tests.fast.oracles.device import FEED, Device

NONE, STOP, STOP_TOKEN, LENGTH, ERROR = 0, 1, 2, 3, 5
EOS, HALT = 90, 91
GROUPS = [[(0, 0)], [(0, 0)], [(1, 5)], [(0, 0), (1, 6)], [(1, 9), (0, 0)], [(0, 0), (0, 0)]]


class Truth:
    """A request from the client's view."""

    def __init__(self, number, prompt, root, media, keys, **rules):
        self.number = number
        self.prompt_len = len(prompt)
        self.tokens = list(prompt)  # the prompt and every token that the device sampled
        self.root = root
        self.media = media  # (start, length, entry, entry_row_start, content)
        self.keys = keys
        self.rules = rules
        self.identities = []
        self.computed = 0
        self.settled = len(prompt)  # tokens that commit() has reported
        self.broken = False
        self.started = False
        self.rank = None
        self.flow = 0

    def key(self, position):
        return self.keys[position] if position < self.prompt_len else (self.tokens[position], 0)

    def verdict(self, context):
        """The reason why the request ends with its newest settled token."""
        made = self.settled - self.prompt_len
        token = self.tokens[self.settled - 1]
        if made >= self.rules["min_tokens"]:
            if token == EOS and not self.rules["ignore_eos"]:
                return STOP
            if token == HALT and self.rules["stop_ids"]:
                return STOP_TOKEN
        ends = sum(self.media[-1][:2]) if self.media else 0
        if ends > self.prompt_len:  # media rows for tokens of the answer are used up
            context = min(context, ends)
        return LENGTH if made == self.rules["max_tokens"] or self.settled == context else NONE


class Walk:
    def __init__(self, seed, **fixed):
        rng = self.rng = random.Random(seed)
        size = rng.choice([1, 2, 4, 8])
        groups = fixed.get("groups") or rng.choice(GROUPS)
        rows = fixed.get("max_rows") or rng.randint(1, 6)
        self.settings = {
            "max_slots": rows + rng.randint(0, 6),
            "max_rows": rows,
            "max_tokens": rows + rng.choice([0, 3, 20]),
            "max_model_len": 64,
            "num_blocks": 1 + len(groups) * rng.choice([12, 20, 64]) * max(1, 4 // size),
            "block_size": size,
            "groups": groups,
            "prefix_caching": rng.random() < 0.8,
            "hash_key": rng.randbytes(16),
            "policy": rng.randrange(2),
            "max_chunk": rng.choice([0, 0, 1, 5]),
            "encoder_budget": rng.choice([0, 6, 12]),
            "encoder_capacity": rng.choice([0, 10, 16]),
            "hash_bits": rng.choice([8, 128]),
            **fixed,
        }
        self.flows = 1 + seed % 2 * min(2, self.settings["max_slots"] - 1)
        self.groups, self.block_size = groups, self.settings["block_size"]
        self.scheduler = Scheduler(**self.settings)
        self.updates = len(groups) * self.settings["max_model_len"]
        updates = [self.updates + rng.choice([0, 40, 4000]) for _ in range(3)]
        self.plans = [StepPlan(rows, self.settings["max_tokens"], count) for count in updates]
        self.device = Device(rng, groups, self.block_size, self.draw)
        self.by_slot, self.live, self.entries, self.contents = {}, {}, {}, {}
        self.launched = []  # (plan, sampled, fails, broken flag per row), oldest first
        self.clock = self.number = self.ended = 0
        self.idle_steps = self.restarts = 0

    def draw(self, request):
        return self.rng.choices([EOS, HALT, self.rng.randrange(4)], [1, 1, 20])[0]

    # Calls of the event loop.

    def add(self):
        rng, scheduler = self.rng, self.scheduler
        length = rng.choice([1, 2, rng.randint(1, 12), rng.randint(1, 40), 63])
        prompt = [rng.randrange(2) for _ in range(length)]
        rules = {
            "max_tokens": rng.choice([1, 2, rng.randint(1, 30), 80]),
            "min_tokens": rng.choice([0, 0, 3]),
            "ignore_eos": rng.random() < 0.2,
            "stop_ids": [HALT] if rng.random() < 0.5 else [],
        }
        media, keys = self.media_for(prompt) if rng.random() < 0.4 else ([], [(token, 0) for token in prompt])
        root = bytes([rng.randrange(2)]) * 16
        priority = rng.randint(-2, 2)
        self.clock += rng.choice([0.0, 1.0])
        slot = scheduler.add(
            self.number,
            np.array(prompt, np.int32),
            **rules,
            eos_ids=[EOS],
            priority=priority,
            arrival=self.clock,
            root=root,
            read_cache=rng.random() < 0.9,
            flow=(flow := self.number % self.flows),
            weight=1 + flow,
            media=np.array([m[:4] for m in media], np.int32).reshape(-1, 4) if media else None,
            keys=np.array(keys, np.int64).T.copy() if media else None,
            **self.hints(length),
        )
        if slot < 0:
            for entry in {m[2] for m in media}:
                if scheduler.discard_entry(entry):
                    del self.entries[self.contents.pop(entry)]
            if slot == -1:
                assert scheduler.ledger()["slots"] == self.settings["max_slots"]
            return
        assert slot not in self.by_slot
        request = Truth(self.number, prompt, root, media, keys, **rules)
        by_priority = priority if self.settings["policy"] else 0
        request.flow = flow
        request.rank = (by_priority, self.clock, self.number)
        self.by_slot[slot] = self.live[self.number] = request
        self.number += 1

    def hints(self, length):
        """Further arguments for adding a request."""
        return {}

    def media_for(self, prompt):
        """A few items in runs, some interleaved; equal contents share an entry; the last may extend past the prompt."""
        rng, spans, at, keys = self.rng, [], 0, [(token, 0) for token in prompt]
        used = {}
        for _ in range(rng.randint(1, 4)):
            content = rng.randrange(8)
            rows = 3 + content
            if content not in self.entries:
                entry = self.scheduler.add_entry(rows)
                assert entry > 0
                self.entries[content], self.contents[entry] = entry, content
            at += rng.randint(0, 3)
            first = used.get(content, 0)
            room = len(prompt) - at
            length = min(rng.randint(1, rows), rows - first, room)
            if length < 1:
                continue
            if length == room and rng.random() < 0.7:  # media rows for tokens of the answer
                length = rows - first
            used[content] = first + length
            spans.append((at, length, self.entries[content], first, content))
            for k in range(min(length, room)):
                keys[at + k] = (-(1 << 62) + first + k, content + 1)
            at += length
        return spans, keys

    def abort(self):
        if not self.live:
            return
        number = self.rng.choice(sorted(self.live))
        assert self.scheduler.abort(number)
        del self.live[number]
        self.ended += 1
        self.free_slots()
        assert not self.scheduler.abort(number)

    def free_slots(self):
        for slot in self.scheduler.freed_slots[: self.scheduler.num_freed]:
            request = self.by_slot.pop(slot)
            assert request.number not in self.live

    # Calls of the device thread.

    def schedule(self):
        plan = next(p for p in self.plans if all(p is not other for other, *_ in self.launched))
        before = {slot: self.scheduler.seqs.snapshot(slot) for slot in self.by_slot}
        self.scheduler.schedule(plan)
        self.check_plan(plan, before)
        if plan.num_rows:
            fails = self.rng.random() < self.failing
            sampled = self.device.run(plan, self.by_slot, fails)
            broken = [self.by_slot[slot].broken for slot in plan.row_slot[: plan.num_rows]]
            self.launched.append((plan, sampled, fails, broken))
            self.idle_steps = 0
        elif not self.launched:
            self.idle_steps += 1
            assert not self.live, "nothing runs, nothing is in flight, and somebody waits"

    failing = 0.0
    sparing = 0.0  # share of rows without emitted tokens that start over when their step fails

    def check_plan(self, plan, before):
        settings, rows = self.settings, plan.num_rows
        assert rows <= settings["max_rows"]
        assert plan.num_tokens <= settings["max_tokens"]
        assert plan.num_updates <= plan.max_updates
        lens = list(plan.row_len[:rows])
        assert plan.row_start[rows] <= plan.num_tokens <= sum(lens), "rows with drafts share places for them"
        assert lens[: plan.num_decode_rows] == [1] * plan.num_decode_rows
        chunks = range(plan.num_decode_rows, rows)
        assert all(lens[row] > 1 for row in chunks)
        fed = [bool(plan.row_flags[row] & FEED) for row in chunks]
        assert fed == sorted(fed), "rows with drafts come last"
        assert all(lens[row] <= (settings["max_chunk"] or 1000) for row, drafted in zip(chunks, fed) if not drafted)
        slots = list(plan.row_slot[:rows])
        assert len(set(slots)) == rows
        encoded = [plan.encode_entry[e] for e in range(plan.num_encodes)]
        assert len(set(encoded)) == len(encoded)
        sizes = [3 + self.contents[entry] for entry in encoded]
        assert not settings["encoder_budget"] or sum(sizes) <= settings["encoder_budget"] or len(sizes) == 1
        after = {slot: self.scheduler.seqs.snapshot(slot) for slot in self.by_slot}
        assert all(after[slot]["state"] == 2 for slot in slots)
        started = []
        for slot, facts in after.items():
            request = self.by_slot[slot]
            if facts["epoch"] != before[slot]["epoch"]:
                request.computed = 0  # preempted
            again = facts["epoch"] != before[slot]["epoch"]  # it may have restarted in the same plan
            if slot in slots and (before[slot]["state"] == 1 or again):
                request.computed = plan.row_computed[slots.index(slot)]
                if not request.started:
                    assert self.scheduler.cached_tokens(slot) == request.computed
                    request.started = True
                started.append(slot)
        self.check_shares(plan, before, after)
        for flow in range(self.flows):  # each flow's requests start in order
            of_flow = [slot for slot, request in self.by_slot.items() if request.flow == flow]
            waiting = [self.by_slot[s].rank for s in of_flow if after[s]["state"] == 1]
            newly = [self.by_slot[s].rank for s in of_flow if s in started]
            newly = [rank for rank in newly if settings["policy"] or rank not in self.restarted(before)]
            if newly and waiting:
                assert max(newly) < min(waiting)

    def restarted(self, before):
        """Ranks of the requests that have been preempted."""
        return {self.by_slot[slot].rank for slot, facts in before.items() if facts["epoch"]}

    def check_shares(self, plan, before, after):
        """Of rows without media, each decoding row gets a token first, then the shortest prompts get their shares."""
        running = [slot for slot, facts in before.items() if facts["state"] == 2]
        full = plan.num_updates + self.updates > plan.max_updates
        if full or any(self.by_slot[s].media or after[s]["state"] != 2 for s in running):
            return
        lefts = {}
        for slot in sorted(running, key=lambda slot: self.by_slot[slot].rank):
            lefts[slot] = self.left(before[slot])
        room = self.settings["max_tokens"] - list(lefts.values()).count(1)
        tokens = min(room, max(self.scheduler.shares.prompt_budget, 1))
        lens = [1 if flags & FEED else count for flags, count in zip(plan.row_flags, plan.row_len)]
        given = dict(zip(plan.row_slot[: plan.num_rows], lens))
        assert all(given.get(slot, 0) == left for slot, left in lefts.items() if left < 2)
        chunk = self.settings["max_chunk"] or self.settings["max_tokens"]
        prompts = {slot: left for slot, left in lefts.items() if left > 1}
        by_priority = self.settings["policy"]
        order = {slot: (self.by_slot[slot].rank[0] if by_priority else 0, left) for slot, left in prompts.items()}
        if any(facts["state"] == 1 for facts in before.values()):  # waiting prompts may overtake, and leave tokens over
            for slot in sorted(prompts, key=order.get)[:1]:
                assert given.get(slot, 0) >= min(prompts[slot], chunk, max(tokens // 4, 1))
            return
        for slot in sorted(prompts, key=order.get):  # the shortest first; equal lengths in order of rank
            left = prompts[slot]
            limit = min(chunk, tokens)
            share = left if limit < left <= min(chunk, tokens + tokens // 8, room) else min(left, limit)
            tokens, room = tokens - share, room - share
            assert given.get(slot, 0) == share
            tokens = max(tokens, 0)

    def left(self, facts):
        """Number of tokens that a slot could compute."""
        known = facts["num_tokens"] + facts["choosing"]
        return known - facts["computed"] if known < facts["max_len"] else 0

    def settle(self):
        plan, sampled, fails, broken = self.launched.pop(0)
        restarting = set(plan.row_slot[: plan.num_rows]) & set(self.scheduler.seqs.restarting())
        scheduler = self.scheduler
        old = {slot: scheduler.seqs.snapshot(slot) for slot in plan.row_slot[: plan.num_rows]}
        forced = [0] * plan.num_rows
        if fails:
            restarting |= self.fail(plan)
        else:
            if self.rng.random() < 0.05:
                forced[self.rng.randrange(plan.num_rows)] = 6
            scheduler.commit(plan, np.array(sampled, np.int32).ravel(), np.array(forced, np.int32))
        for row in range(plan.num_rows):
            if plan.row_slot[row] in restarting:
                assert (plan.out_token[row * plan.width], plan.out_finish[row]) == (-1, NONE)
            else:
                self.check_row(plan, row, sampled[row], forced[row], broken[row], old)
        self.free_slots()
        for entry, dead in scheduler.take_evicted():
            self.device.embeddings.pop(entry, None)
            self.device.begun.discard(entry)
            # The entry was evicted while the step just settled, or a later step, was in flight: that step did not read
            # the entry.
            assert self.failing or self.device.last_read.pop(entry, -1) < plan.step_id
            if dead:
                del self.entries[self.contents.pop(entry)]

    def fail(self, plan):
        """Fails the step; slots that start over lose their sampled tokens, none of which was reported."""
        again = np.zeros(self.settings["max_slots"], np.uint8)
        for slot, request in self.by_slot.items():
            again[slot] = request.settled == request.prompt_len and self.rng.random() < self.sparing
        self.scheduler.fail(plan, again if self.sparing else None)
        slots = set(self.scheduler.seqs.restarting())
        for slot in slots:
            request = self.by_slot[slot]
            assert request.settled == request.prompt_len
            del request.tokens[request.prompt_len :], request.identities[request.prompt_len :]
            request.computed, request.broken = 0, False
            self.restarts += 1
        return slots

    def check_row(self, plan, row, token, forced, broken, old):
        request = self.by_slot[plan.row_slot[row]]
        emitted, why = plan.out_token[row], plan.out_finish[row]
        assert plan.out_request[row] == request.number
        if request.number not in self.live:
            assert (emitted, why) == (-1, NONE)
            assert old[plan.row_slot[row]]["state"] == 3
            return
        if broken:
            assert (emitted, why) == (-1, ERROR)
        elif not plan.row_flags[row] & 1:
            assert (emitted, why) == (-1, forced)
        else:
            request.settled += 1
            assert emitted == token == request.tokens[request.settled - 1]
            assert why == (forced or request.verdict(self.settings["max_model_len"]))
        if why:
            del self.live[request.number]
            self.ended += 1

    def check_books(self):
        scheduler, ledger = self.scheduler, self.scheduler.ledger()
        assert ledger["free"] + ledger["cached"] + ledger["used"] == ledger["total"]
        held = [
            block for slot in self.by_slot for g in range(len(self.groups)) for block in scheduler.tables.row(slot, g)
        ]
        held = [block for block in held if block]
        assert ledger["refs"] == len(held)
        assert ledger["used"] == len(set(held))
        assert ledger["slots"] == len(self.by_slot)
        named = set(scheduler.index.blocks())
        assert len(named) == ledger["index_entries"]
        assert ledger["cached"] == len(named - set(held))
        capacity = self.settings["encoder_capacity"]
        assert not capacity or ledger["encoder_rows"] <= capacity
        assert ledger["encoder_entries"] == len(self.contents)

    def run(self, steps, arrivals=0.5, aborts=0.03, failing=0.0, sparing=0.0):
        self.failing, self.sparing = failing, sparing
        while steps or self.live or self.launched:
            steps -= steps > 0
            if steps and self.rng.random() < arrivals:
                self.add()
            if self.rng.random() < aborts:
                self.abort()
            if len(self.launched) < 2 and self.rng.random() < 0.9:
                self.schedule()
                self.check_books()
            if self.launched and (len(self.launched) == 2 or self.rng.random() < 0.3):
                self.settle()
                self.check_books()
            if self.rng.random() < 0.01:
                self.scheduler.reset_prefix_cache()
        assert self.ended == self.number
        ledger = self.scheduler.ledger()
        for name in ("used", "refs", "table_rows", "slots", "running", "waiting", "encoder_in_use", "in_flight"):
            assert ledger[name] == 0, name
        assert ledger["free"] + ledger["cached"] == ledger["total"]
        self.check_names(ledger)

    def check_names(self, ledger):
        """Checks the names in the prefix index when no request is open."""
        assert ledger["index_entries"] == ledger["cached"]


@pytest.mark.parametrize("seed", range(160))
def test_every_row_reads_its_own_prefix_and_every_request_ends_once(seed):
    Walk(seed).run(150)


@pytest.mark.parametrize("seed", range(40))
def test_a_failed_step_ends_its_rows_and_what_read_its_results(seed):
    Walk(seed).run(120, failing=0.1)


@pytest.mark.parametrize("seed", range(60))
def test_rows_without_news_start_over_when_their_step_fails(seed):
    walk = Walk(seed)
    walk.run(120, failing=0.15, sparing=0.8)
    assert walk.restarts > 0


@pytest.mark.parametrize("seed", range(20))
def test_a_pool_that_is_too_small_preempts_and_still_ends_everything(seed):
    walk = Walk(seed, num_blocks=28, block_size=4, groups=[(0, 0)], max_rows=6, max_slots=9, max_tokens=26)
    walk.run(150, arrivals=0.9, aborts=0.01)
    assert walk.scheduler.num_preemptions > 0


@pytest.mark.parametrize("seed", [1135, 1347, 1443, 1666, 2476, 2972])
def test_walks_of_the_long_form_that_have_failed(seed):
    """Towers that run in parts, with steps that fail and plans that are dropped."""
    test_the_long_form_of_the_walk(seed)


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", range(1000, 3000))
def test_the_long_form_of_the_walk(seed):
    long = {} if seed % 4 < 2 else {"max_model_len": 200}
    Walk(seed, **long).run(500, failing=seed % 2 * 0.02)
