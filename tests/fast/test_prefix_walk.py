"""Prefix hits of the whole scheduler against a brute-force search (short form of R2).

Requests over a small alphabet run one after another. The pools are too small for all their prefixes. There are several
roots, media keys, kinds of groups and widths of hashes. Before each request a brute-force search reads from the
simulated device which named blocks hold exactly the beginning of this request. The hit must be the longest prefix that
all groups can serve.
"""

import random

import numpy as np
import pytest

from _fast.plan import StepPlan
from _fast.scheduler import Scheduler
from tests.fast.oracles.device import Device


class Asker:
    """Runs one request at a time, so that nothing changes between the brute-force search and the hit."""

    def __init__(self, seed, groups, hash_bits):
        rng = self.rng = random.Random(seed)
        self.size = rng.choice([1, 2, 4])
        self.groups = groups
        self.scheduler = Scheduler(
            max_slots=2, max_rows=1, max_tokens=16, max_model_len=48, num_blocks=1 + len(groups) * rng.choice([50, 90]),
            block_size=self.size, groups=groups, hash_key=rng.randbytes(16), hash_bits=hash_bits,
        )  # fmt: skip
        self.plan = StepPlan(1, 16, 48 * len(groups))
        self.device = Device(rng, groups, self.size, lambda request: rng.randrange(2))
        self.number = 0

    def longest(self, request):
        """The longest possible hit, found by checking every named block."""
        named = set(self.scheduler.index.blocks())
        found = []
        for group in range(len(self.groups)):
            held = [
                {
                    b
                    for b in named
                    if self.device.kv.get((b, self.size - 1)) == (group, self.device.identity(request, p))
                }
                for p in range(self.size - 1, len(request.tokens), self.size)
            ]
            assert all(len(blocks) <= 1 for blocks in held), "two blocks with one name"
            found.append([bool(blocks) for blocks in held])
        for count in range((len(request.tokens) - 1) // self.size, 0, -1):
            lows = [max(0, count * self.size - window + 1) // self.size if kind else 0 for kind, window in self.groups]
            if all(all(have[low:count]) for have, low in zip(found, lows)):
                return count * self.size
        return 0

    def ask(self):
        rng = self.rng
        length = rng.randint(1, 40)
        request = Known([rng.choice("aabcd") for _ in range(length)], bytes([rng.randrange(2)]) * 16, rng)
        reads = rng.random() < 0.9
        expected = self.longest(request) if reads else 0
        slot = self.scheduler.add(
            self.number,
            np.array(request.tokens, np.int32),
            max_tokens=rng.randint(1, 8),
            root=request.root,
            keys=np.array(request.keys, np.int64).T.copy(),
            read_cache=reads,
        )
        while self.scheduler.schedule(self.plan):
            if request.computed is None:
                request.computed = self.plan.row_computed[0]
                assert self.scheduler.cached_tokens(slot) == request.computed == expected
            sampled = self.device.run(self.plan, {slot: request}, False)
            self.scheduler.commit(self.plan, np.array(sampled, np.int32))
            if rng.random() < 0.003:
                self.scheduler.reset_prefix_cache()
        self.number += 1
        return expected


class Known:
    """A request, with the attributes that the simulated device reads."""

    def __init__(self, letters, root, rng):
        self.tokens = ["abcd".index(letter) for letter in letters]
        # The letter d is a media position: one placeholder token with three contents that differ only in their keys.
        # Two of the keys differ only in their second word.
        media = [(-(1 << 62), 1), (-(1 << 62), 2), (-(1 << 61), 2)]
        self.keys = [(t, 0) if t < 3 else rng.choice(media) for t in self.tokens]
        self.prompt_len = len(self.tokens)
        self.root = root
        self.media = []
        self.identities = []
        self.computed = None
        self.broken = False

    def key(self, position):
        return self.keys[position] if position < self.prompt_len else (self.tokens[position], 0)


@pytest.mark.parametrize("hash_bits", [128, 8])
@pytest.mark.parametrize(
    "groups", [[(0, 0)], [(1, 7)], [(0, 0), (1, 6)], [(1, 6), (0, 0)]], ids=["full", "sliding", "both", "turned"]
)
@pytest.mark.parametrize("seed", range(3))
def test_a_hit_is_the_longest_prefix_that_brute_force_finds(seed, groups, hash_bits):
    asker = Asker(seed, groups, hash_bits)
    hits = [asker.ask() for _ in range(120)]
    assert sum(hits) > 0
    ledger = asker.scheduler.ledger()
    assert ledger["used"] == 0
    assert ledger["index_entries"] == ledger["cached"]
    asker.scheduler.reset_prefix_cache()
    ledger = asker.scheduler.ledger()
    assert ledger["index_entries"] == ledger["cached"] == 0
    assert ledger["free"] == ledger["total"]
