"""Long random walks: the pool, the prefix index and the queue against their oracles (short form of R1 and R2)."""

import random

import pytest

from _fast.blocks import BlockPool
from _fast.prefix import PrefixIndex
from _fast.queue import WaitQueue
from tests.fast.oracles import blocks, prefix, queue

KEY = bytes(range(16))


@pytest.mark.parametrize("runs", [None, (1, 1), (3, 2), (66, 5)], ids=["blocks", "1", "3", "66"])
@pytest.mark.parametrize("seed", range(100))  # 160,000 moves
def test_the_pool_makes_the_same_moves_as_its_oracle(seed, runs):
    walk_the_pool(seed, 400, runs)


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("runs", [(1, 1), (3, 2), (66, 5)], ids=["1", "3", "66"])
@pytest.mark.parametrize("seed", range(1000, 1100))  # 300,000 moves each
def test_the_long_form_of_the_pools_walk(seed, runs):
    walk_the_pool(seed, 10_000, runs)


def walk_the_pool(seed, moves, runs):
    """Random moves; after each move the pool's blocks, runs, lists and counts equal the oracle's."""
    rng = random.Random(seed)
    size = rng.randint(2, 65) + (8 * runs[0] if runs else 0)
    pool = BlockPool(size, *runs, size) if runs else BlockPool(size)
    oracle = blocks.Pool(size, *runs or ())
    for _ in range(moves):
        used = [block for block, refs in oracle.refs.items() if refs]
        idle_named = [block for block, named in oracle.idle if named] + oracle.idle_heads(3, 4)
        move = rng.choice(["acquire", "acquire", "run", "free", "free", "share", "name", "unname"])
        if move == "acquire":
            assert pool.acquire() == oracle.acquire(), f"seed {seed}"
        elif move == "run" and runs:
            kind = rng.choice([1, 1, 2])
            head = pool.acquire_run(kind)
            assert head == oracle.acquire_run(kind), f"seed {seed}"
            assert not head or pool.run(pool.run_id(head)) == oracle.runs[head][1]
        elif move == "free" and used:
            block = rng.choice(used)
            pool.free(block)
            oracle.free(block)
        elif move == "share" and used + idle_named:
            block = rng.choice(used + idle_named)
            pool.share(block)
            oracle.share(block)
        elif move == "name" and used:
            block = rng.choice([block for block in used if oracle.runs.get(block, (1,))[0] == 1] or [0])
            if block:
                pool.set_named(block, True)
                oracle.set_named(block, True)
        elif move == "unname" and oracle.named:
            block = rng.choice(sorted(oracle.named))
            pool.set_named(block, False)
            oracle.set_named(block, False)
        assert pool.idle() == oracle.idle, f"seed {seed}"
        assert (pool.num_free, pool.num_cached, pool.num_used) == oracle.counts, f"seed {seed}"
        assert pool.num_free + pool.num_cached + pool.num_used == pool.total
        assert pool.sum_refs() == sum(oracle.refs.values())
        for place in (1, 2, 3, 4) if runs else ():
            assert pool.idle_runs(place) == oracle.idle_runs[place], f"seed {seed}"


def test_idle_runs_stay_whole_until_others_need_their_blocks():
    pool = BlockPool(10, 3, 2, 4)
    first, tail = pool.acquire_run(1), pool.acquire_run(2)
    run_id = pool.run_id(first)
    members = pool.run(run_id)
    pool.free(first)
    pool.free(tail)
    assert pool.num_free == 9
    assert [pool.acquire() for _ in range(4)] == [6, 7, 8, 9]  # none of them belongs to an idle run
    assert pool.acquire_run(1) == first
    assert pool.run(run_id) == members
    pool.free(first)
    assert pool.acquire() in members  # the run was broken up
    assert pool.run(run_id) == []
    with pytest.raises(ValueError, match="1 is a state, 2 is a tail"):
        pool.acquire_run(3)
    with pytest.raises(ValueError, match="all are 0, or each is"):
        BlockPool(10, 3)


def test_a_block_freed_once_too_often_is_refused_in_words():
    pool = BlockPool(3)
    block = pool.acquire()
    pool.free(block)
    with pytest.raises(ValueError, match="once too often"):
        pool.free(block)
    with pytest.raises(ValueError, match="this pool has blocks 1 to 2"):
        pool.free(0)
    with pytest.raises(ValueError, match="only used or cached"):
        pool.share(block)


@pytest.mark.parametrize("words", [0, 1, 2, 3, 19])
def test_the_hash_is_siphash_with_128_bits(words):
    index = PrefixIndex(4, words, KEY) if words else None
    if index is None:
        # The paper's vectors for 0 and 1 bytes verify the oracle.
        assert prefix.siphash128(KEY, b"").hex() == "a3817f04ba25a8e66df67214c7550293"
        assert prefix.siphash128(KEY, b"\0").hex() == "da87c1d86b99af44347659119b22fc45"
        return
    rng = random.Random(words)
    for _ in range(20):
        parent = rng.randbytes(16)
        keys = [rng.randrange(-(1 << 63), 1 << 63) for _ in range(words * rng.randint(1, 2))]
        assert index.digest(parent, keys) == prefix.chain(KEY, parent, keys)


@pytest.mark.parametrize("hash_bits", [128, 8])
@pytest.mark.parametrize("seed", range(100))  # 100,000 moves
def test_the_index_finds_exactly_what_its_oracle_finds(seed, hash_bits):
    rng = random.Random(seed)
    size = rng.choice([2, 8, 64, 200])
    index, oracle = PrefixIndex(size, 2, KEY, hash_bits), prefix.Index()
    links = [rng.randbytes(16) for _ in range(2)]
    held = {}
    for _ in range(500):
        link = rng.choice(links)
        keys = tuple(rng.randrange(4) for _ in range(rng.choice([2, 2, 4])))
        name = (index.digest(link, keys), link, rng.randrange(2), rng.randrange(2), keys)
        spare = [block for block in range(1, size) if block not in held]
        found = index.lookup(*name)
        assert found == oracle.lookup(*name), f"seed {seed}"
        if not found and spare and rng.random() < 0.6:
            block = rng.choice(spare)
            links.append(index.add(block, *name))
            oracle.add(block, *name)
            held[block] = name
        elif held and rng.random() < 0.5:
            block = rng.choice(sorted(held))
            assert index.discard(block)
            assert oracle.discard(block)
            del held[block]
        elif rng.random() < 0.005:
            index.reset()
            oracle.blocks.clear()
            held.clear()
        assert index.num_entries == len(oracle.blocks)
    for block, name in held.items():
        assert index.lookup(*name) == block, f"seed {seed}"


@pytest.mark.parametrize("seed", range(125))  # 100,000 moves
def test_the_queue_gives_the_order_of_its_oracle(seed):
    """One flow, or several of different weights; slots return after preemption, finish with tokens, and expire."""
    rng = random.Random(seed)
    by_priority, flows = seed % 2 == 1, rng.choice([1, 2, 3, 12])
    weights = [rng.choice([1, 1, 3]) for _ in range(flows)]
    waiting, oracle = WaitQueue(40, by_priority), queue.Queue(by_priority)
    for order in range(800):
        slot = rng.randrange(40)
        if slot in oracle.waiting or rng.random() < 0.3:
            first, generated = waiting.peek(), rng.choice([0, 5, 900])
            if rng.random() < 0.2:
                assert waiting.discard(slot) == oracle.discard(slot)
            elif first >= 0:
                waiting.start(first, generated)
                oracle.start(first, generated)
        else:
            rank = (rng.randint(-3, 3), rng.choice([0.0, 1.5, rng.random()]), order, rng.random() < 0.2)
            flow = rng.randrange(flows)
            more = {"flow": flow, "weight": weights[flow], "cost": rng.choice([1, 40, 300, 5000])}
            more["deadline"] = rng.choice([float("inf"), order + 100.0])
            waiting.add(slot, *rank, **more)
            oracle.add(slot, *rank, **more)
        if rng.random() < 0.05:
            waiting.expire(float(order))
            assert sorted(waiting.take_expired()) == sorted(oracle.expire(float(order))), f"seed {seed}"
        assert waiting.peek() == oracle.peek(), f"seed {seed}"
        assert waiting.size == len(oracle.waiting)


def served(waiting, count):
    """The slots in the order in which the queue serves them."""
    found = []
    for _ in range(count):
        found.append(waiting.peek())
        waiting.start(found[-1])
    return found


def test_flows_are_served_in_turn_however_long_one_of_them_is():
    waiting = WaitQueue(100)
    for slot in range(90):
        waiting.add(slot, arrival=float(slot), order=slot, flow=0, cost=200)
    served(waiting, 10)
    waiting.add(95, arrival=95.0, order=95, flow=1, cost=200)
    assert 95 in served(waiting, 3)


def test_a_weight_is_a_share_of_the_tokens():
    waiting = WaitQueue(200)
    for slot in range(200):
        waiting.add(slot, arrival=float(slot), order=slot, flow=slot % 2, weight=3 if slot % 2 else 1, cost=128)
    odd = sum(slot % 2 for slot in served(waiting, 80))
    assert 58 <= odd <= 62  # 60 is three quarters of 80


def test_what_a_flow_has_generated_counts_against_it():
    waiting = WaitQueue(64)
    for slot in range(60):
        waiting.add(slot, arrival=float(slot), order=slot, flow=slot % 2, cost=10)
    taken = []
    for _ in range(28):
        first = waiting.peek()
        waiting.start(first, generated=500 if first % 2 else 10)
        taken.append(first % 2)
    assert sum(taken) <= 3  # a request of flow 1 costs as much as twenty-five of flow 0


def test_an_expired_slot_that_is_aborted_is_not_reported_for_its_next_owner():
    waiting = WaitQueue(4)
    waiting.add(1, deadline=5.0)
    waiting.add(2, deadline=5.0)
    waiting.expire(6.0)
    assert not waiting.discard(1)  # its request is aborted before the caller has read the expired slots
    waiting.add(1)
    assert waiting.take_expired() == [2]
    assert waiting.peek() == 1
