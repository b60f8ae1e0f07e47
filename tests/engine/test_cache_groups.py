"""Layers with different kinds of cache share a pool of blocks: layouts, tokens, freed blocks of windows, a toy kind."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import engine.run.built
import engine.run.start
from engine.base.config import EngineConfig
from engine.base.errors import ConfigError
from engine.base.request import Request, SamplingParams
from engine.cache.layout import CacheLayout
from engine.cache.tokens import EVERY_TOKEN, FullSpec, GuestSpec
from engine.cache.window import SlidingSpec, TapsSpec
from engine.layers.attention import PagedSelfAttention
from engine.run.start import load_runtime
from engine.step.live import LiveRow, Place
from tests import tiny
from tests.engine.host_accelerator import HostAccelerator
from tests.engine_kit import SMALL
from tests.models.harness import Harness, load

FULL, NEAR = FullSpec(2, 8, torch.float32), SlidingSpec(2, 8, torch.float32, 32)
WINDOW, BLOCK = 8, 4  # window of the tiny checkpoint, block size of these engines


@pytest.fixture
def device_path(request, monkeypatch):
    """With `accelerated`: the device's executor, on a CPU."""
    if request.param == "accelerated":
        monkeypatch.setattr(engine.run.start, "open_accelerator", lambda _device: HostAccelerator())
    return request.param


def runtime_of(name, **settings):
    return load_runtime(
        EngineConfig(model=str(tiny.checkpoint(name)), **{**SMALL, "block_size": BLOCK, **settings}), {}, lambda: None
    )


def test_a_drafters_layer_shares_the_blocks_of_the_models_layers():
    layout = CacheLayout([*[FULL] * 3, GuestSpec(4, 16, torch.float32, host=FULL.shared)], BLOCK)
    (group,) = layout.groups
    assert group.spec == FULL, "the step plans the group's attention by it"
    keys, _ = layout.allocate(3, poison=False)[3]
    assert keys.shape == (3, 4, BLOCK, 16)
    assert len(CacheLayout([NEAR, GuestSpec(2, 8, torch.float32)], BLOCK).groups) == 2


def groups_of(runtime):
    return CacheLayout(runtime.model.cache_specs(), BLOCK).tables


def steps(runtime, prompt, count):
    """Computes `count` greedy tokens after the prompt, step by step; yields the slot and each step's tokens."""
    scheduler, executor, empty = runtime.scheduler, runtime.executor, np.zeros(0, np.int32)
    request = Request(prompt, SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True))
    slot = scheduler.add(
        0,
        prompt,
        max_tokens=count,
        min_tokens=0,
        ignore_eos=True,
        eos_ids=empty,
        stop_ids=empty,
        priority=0,
        arrival=0.0,
        root=bytes(16),
        read_cache=True,
    )
    executor.admit(slot, LiveRow(0, 0, request, 0, Place(bytes(16))))
    while (plan := executor.plan(scheduler)) is not None:
        step = runtime.executor.launch_forward(plan)
        runtime.executor.launch_sample(step, lambda _: None)
        assert step.event.wait(60)
        assert step.error is None, step.error
        executor.collect(step)
        tokens = step.home.tokens.reshape(-1)
        scheduler.commit(plan, tokens)
        yield slot, [int(token) for token in tokens if token >= 0]


def test_small_layers_of_a_draft_model_share_pages():
    """Each would need a page of its own, and blocks of windows would have no use for so many."""
    model = [*[FULL] * 2, *[NEAR] * 10]
    guest = GuestSpec(1, 4, torch.float32, host=FULL.shared)
    each, least = (spec.block_bytes(BLOCK) for spec in (FULL, guest))
    assert each == 4 * least
    layout = CacheLayout([*model, *[guest] * 11], BLOCK)
    assert layout.page_bytes == (each,) * 5
    assert [len(group.layers) for group in layout.groups] == [13, 5, 5]
    caches = layout.allocate(3, poison=False)
    for number in range(len(caches)):
        for other in range(number):
            same = layout.group_of[number] == layout.group_of[other]
            places = [{tensor.data_ptr() for tensor in caches[n]} for n in (number, other)]
            assert not (same and places[0] & places[1])
    large = GuestSpec(8, 64, torch.float32, host=FULL.shared)
    with pytest.raises(ConfigError, match="with the drafter of --speculative-config the layers' caches differ so much"):
        CacheLayout([FULL, NEAR, large], BLOCK)


def test_equal_layers_are_one_group_whose_blocks_have_a_page_per_layer():
    layout = CacheLayout([FULL] * 5, 16)
    assert layout.tables == [(0, 0)]
    assert layout.group_of == [0] * 5
    assert layout.block_bytes == 5 * 2 * 2 * 16 * 8 * 4
    assert layout.blocks_for(33, 100) == 3


def test_a_kind_of_many_layers_makes_as_many_groups_as_the_rarest_kind_needs():
    layout = CacheLayout([NEAR, NEAR, FULL] * 2 + [NEAR], 16)
    assert layout.num_buffers == 2
    assert [group.layers for group in layout.groups] == [(0, 1), (3, 4), (6,), (2, 5)]
    assert layout.tables == [(1, 32), (1, 32), (1, 32), (0, 0)]
    assert layout.group_of == [0, 0, 3, 1, 1, 3, 2]
    # A long context: all blocks for the full layers; for the others the window, two chunks and partial blocks.
    assert layout.blocks_for(16000, 16) == 1000 + 3 * ((32 + 2 * 16) // 16 + 3)


def test_nearly_as_many_layers_of_another_kind_are_one_group():
    layout = CacheLayout([NEAR, FULL] * 4 + [NEAR], 16)
    assert [group.layers for group in layout.groups] == [(0, 2, 4, 6, 8), (1, 3, 5, 7)]


def test_pages_of_unlike_kinds_are_padded_and_too_much_padding_is_refused():
    small = FullSpec(2, 6, torch.float32)
    layout = CacheLayout([FULL, small], 16)
    assert layout.page_bytes == (FULL.block_bytes(16),) != (small.block_bytes(16),)
    with pytest.raises(ConfigError, match=r"44% of the KV cache would be padding \(at most 25%\)"):
        CacheLayout([FULL, FullSpec(2, 1, torch.float32)], 16)
    coded = [replace(spec, dtype=torch.float8_e4m3fn) for spec in (FULL, FullSpec(2, 1, torch.float32))]
    with pytest.raises(ConfigError, match=r"not supported with codes of 8 bits; name --kv-cache-dtype bfloat16$"):
        CacheLayout(coded, 16)


def test_layers_of_small_pages_lie_side_by_side_where_padding_would_be_too_much():
    """As in Gemma 4: the few layers with full attention have wider heads."""
    wide = FullSpec(2, 16, torch.float32)
    layout = CacheLayout([NEAR, NEAR, NEAR, wide] * 2, 16)
    assert layout.page_bytes == (wide.block_bytes(16),) * 2 == (2 * NEAR.block_bytes(16),) * 2
    assert [group.layers for group in layout.groups] == [(0, 1, 2, 4), (5, 6), (3, 7)]
    caches = layout.allocate(4, poison=True)
    for number, cache in enumerate(caches):
        for view in cache:
            view[1 + layout.group_of[number]].fill_(number)
    for group in layout.groups[:2]:  # layers that share a page do not overwrite each other
        for layer in group.layers:
            block = 1 + layout.group_of[layer]
            assert all((view[block] == layer).all() for view in caches[layer])


def test_a_page_is_a_little_larger_where_layers_with_scales_then_lie_side_by_side():
    """As in Gemma 4 with an 8-bit cache: two heads of half the width have one more scale than one whole head."""
    near = replace(NEAR, head_dim=32, dtype=torch.float8_e4m3fn)
    wide = replace(FULL, head_dim=64, dtype=torch.float8_e4m3fn)
    assert wide.block_bytes(16) < 2 * near.block_bytes(16) < 1.1 * wide.block_bytes(16)
    layout = CacheLayout([near, near, near, near, wide] * 7, 16)
    assert [len(group.layers) for group in layout.groups] == [14, 14, 7]
    assert layout.page_bytes == (2 * near.block_bytes(16),) * 7


def test_small_layers_that_see_all_lie_side_by_side_since_long_contexts_fill_their_blocks():
    """As in LFM2: ten convolutions and six layers with attention, whose blocks have half the bytes."""
    taps = TapsSpec(64, torch.float32, 3)
    layout = CacheLayout([taps] * 10 + [FULL] * 6, 16)
    assert taps.block_bytes(16) == 2 * FULL.block_bytes(16)
    assert layout.page_bytes == (taps.block_bytes(16),) * 3
    assert [len(group.layers) for group in layout.groups] == [3, 3, 3, 1, 6]
    assert layout.tables == [(1, 3)] * 4 + [(0, 0)]
    (rows,) = layout.allocate(2, poison=True)[0]
    assert rows.shape == (2, 16, 64)


def test_a_block_is_the_same_page_of_every_buffer_whichever_group_has_it():
    layout = CacheLayout([NEAR, FULL], 4)
    caches = layout.allocate(3, poison=True)
    assert all(view.isnan().all() for cache in caches for view in cache)
    for cache in caches:
        assert [view.shape for view in cache] == [(3, 2, 4, 8)] * 2
    caches[0][1][2] = 7.0  # values of block 2, a block of the first group
    assert (caches[1][1][2] == 7.0).all()
    assert caches[1][0].isnan().all()
    assert caches[1][1][:2].isnan().all()


@pytest.mark.parametrize("device_path", ["cpu", "accelerated"], indirect=True)
@pytest.mark.parametrize("chunk", [0, 5])
def test_groups_give_the_tokens_of_one_full_group_with_masks(device_path, chunk):
    prompt = np.random.default_rng(chunk).integers(2, 90, 61, dtype=np.int32)
    harness = Harness(load(tiny.checkpoint("qwen2-window")))
    want = harness.generate(harness.add(prompt.tolist()), 40)
    runtime = runtime_of("qwen2-window", max_prefill_chunk=chunk)
    assert groups_of(runtime) == [(0, 0), (1, 8), (1, 8)]
    got = [token for _, tokens in steps(runtime, prompt, 40) for token in tokens]
    runtime.executor.backend.close()
    assert got == want


def test_a_cached_prefix_of_all_groups_gives_the_same_tokens():
    prompt = np.random.default_rng(3).integers(2, 90, 50, dtype=np.int32)
    runtime = runtime_of("qwen2-window", max_prefill_chunk=16)
    first, second = ([token for _, tokens in steps(runtime, prompt, 20) for token in tokens] for _ in range(2))
    runtime.executor.backend.close()
    assert runtime.scheduler.prefix_hits >= 40  # tokens
    assert first == second


@pytest.mark.parametrize("name", ["qwen2-window", "gemma3"])
def test_a_sliding_group_holds_the_blocks_of_its_window_only(name):
    runtime = runtime_of(name, max_prefill_chunk=8)
    kinds = [kind for kind, _ in groups_of(runtime)]
    for number, (slot, _) in enumerate(steps(runtime, np.arange(2, 82, dtype=np.int32), 30)):
        tables = runtime.scheduler.tables
        held = [sum(block != 0 for block in tables.row(slot, group)) for group in range(len(kinds))]
        if number < 9 or not tables.row(slot):  # chunks of the prompt, or the end of the row
            continue
        for kind, count in zip(kinds, held):
            assert count <= (WINDOW - 1) // BLOCK + 2 if kind else count >= 20
        assert runtime.scheduler.pool.num_used == sum(held)
    runtime.executor.backend.close()
    assert number > 30


@dataclass(frozen=True, slots=True)
class MarkedSpec:
    """A toy kind of cache: keys, values and a mark for each stored token."""

    plain: FullSpec
    kind = EVERY_TOKEN
    shared = "marked"

    def block_bytes(self, block_size):
        return self.plain.block_bytes(block_size) + 4 * block_size

    def views(self, pages, block_size):
        size = self.plain.block_bytes(block_size)
        return *self.plain.views(pages, block_size), pages[:, size : size + 4 * block_size].view(torch.float32)


class MarkingAttention(PagedSelfAttention):
    """Attention with such a cache."""

    __slots__ = ()

    def cache_spec(self, dtype):
        return MarkedSpec(FullSpec(self.num_kv_heads, self.head_dim, dtype))

    def store(self, x, rope, meta, cache):
        return super().store(x, rope, meta, cache[:2])

    def __call__(self, x, rope, meta, cache):
        keys, values, marks = cache
        marks[meta.slot_mapping // BLOCK, meta.slot_mapping % BLOCK] = 1.0
        for table, length in zip(meta.block_tables, meta.context_len.tolist()):
            assert (marks[table[: -(-length // BLOCK)].long()].flatten()[:length] == 1).all()
        return super().__call__(x, rope, meta, (keys, values))


def test_a_toy_kind_of_cache_is_a_spec_and_its_layer(monkeypatch):
    prompt = np.arange(2, 40, dtype=np.int32)
    want = [token for _, tokens in steps(runtime_of("llama"), prompt, 12) for token in tokens]
    build, made = engine.run.built.build_model, []

    def marked(*args, **named):
        made.append(build(*args, **named))
        made[0].layers[1].attention.__class__ = MarkingAttention
        return made[0]

    monkeypatch.setattr(engine.run.built, "build_model", marked)
    runtime = runtime_of("llama", debug_poison=True)
    assert groups_of(runtime) == [(0, 0), (0, 0), (0, 0)]
    got = [token for _, tokens in steps(runtime, prompt, 12) for token in tokens]
    assert got == want
