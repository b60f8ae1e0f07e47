"""States are stored in runs of ordinary blocks: pages, groups and padding as computed in HYBRID; refused layouts."""

from __future__ import annotations

import logging

import pytest
import torch

from _fast import kinds
from engine.base.errors import ConfigError
from engine.cache.layout import CacheLayout
from engine.cache.spec import CacheKind
from engine.cache.state import StateSpec
from engine.cache.tokens import FullSpec
from engine.explain.explained import captured_of
from engine.kernels.state.places import Part

F32, BF16 = torch.float32, torch.bfloat16


def spec_of(heads, rows, width, conv, ring=20):
    """A state of `heads` x rows x width in float32 with three inputs of a convolution; a tail of similar sizes."""
    state = Part(heads * rows, width, F32), Part(3, conv, BF16)
    tail = Part(heads, width, F32), Part(1, conv, BF16)
    return StateSpec(state, tail, 16, ring)


def layout_of(attention, state, period, count, block_size=16):
    """Every `period`-th layer has attention, the other layers have states."""
    return CacheLayout([attention if k % period == period - 1 else state for k in range(count)], block_size)


# Published shapes: KV heads and head width of attention; the state; layers; page bytes, pages per layer, groups, blocks
# per run, padding.
PUBLISHED = {
    "Qwen3.6-35B-A3B": ((2, 256), (32, 128, 128, 8192), (10, 30), (32768, 66, 3, 198, 0.008)),
    "Qwen3.8-27B": ((4, 256), (48, 128, 128, 10240), (16, 48), (65536, 49, 3, 147, 0.001)),
    "Qwen3.5-9B": ((4, 256), (32, 128, 128, 8192), (8, 24), (65536, 33, 3, 99, 0.008)),
    "Qwen3-Next-80B": ((2, 256), (32, 128, 128, 8192), (12, 36), (32768, 66, 3, 198, 0.008)),
    "Nemotron 3 Nano": ((2, 128), (64, 64, 128, 6144), (6, 23), (16384, 131, 4, 524, 0.047)),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shapes_take_the_published_blocks(name):
    heads, state, (attending, others), (page_bytes, pages, groups, blocks, padding) = PUBLISHED[name]
    spec = spec_of(*state)
    layout = CacheLayout([FullSpec(*heads, BF16)] * attending + [spec] * others, 16)
    runs = layout.runs
    assert layout.page_bytes == (page_bytes,) * attending
    assert (runs.page_bytes, spec.pages(page_bytes), len(runs.groups)) == (page_bytes, pages, groups)
    assert runs.state_blocks == blocks
    assert runs.state_padding == pytest.approx(padding, abs=5e-4)
    assert layout.token_groups == 1
    assert layout.tables == [(kinds.FULL, 0), (kinds.STATE, 16)]
    # A row takes its tokens, a state to read, a state to write, and its tail.
    assert layout.blocks_for(1600, 64) == 100 + 2 * blocks + runs.tail_blocks


def test_published_bytes_of_a_sequence():
    sizes = {"Qwen3.6-35B-A3B": 64.4, "Qwen3.8-27B": 153.9, "Nemotron 3 Nano": 49.1}
    for name, size in sizes.items():
        heads, state, (attending, others), _ = PUBLISHED[name]
        layout = CacheLayout([FullSpec(*heads, BF16)] * attending + [spec_of(*state)] * others, 16)
        assert layout.runs.state_bytes / 1e6 == pytest.approx(size, abs=0.05)


def test_layers_with_tokens_have_the_groups_and_pages_that_they_have_without_states():
    attention, state = FullSpec(2, 256, BF16), spec_of(32, 128, 128, 8192)
    plain, mixed = CacheLayout([attention] * 10, 16), layout_of(attention, state, 4, 40)
    assert plain.runs is None
    assert (plain.page_bytes, plain.num_buffers) == (mixed.page_bytes, mixed.num_buffers)
    assert mixed.groups[0].layers == tuple(range(3, 40, 4))
    assert [mixed.group_of[number] for number in (0, 3, 39)] == [1, 0, 0]
    assert sorted(layer for group in mixed.groups for layer in group.layers) == list(range(40))


def test_few_layers_with_states_make_fewer_buffers():
    """With as many buffers as layers with attention, most of a run would be empty."""
    attention, state = FullSpec(2, 256, BF16), spec_of(32, 128, 128, 8192)
    layout = CacheLayout([attention] * 40 + [state] * 8, 16)
    assert (layout.num_buffers, layout.token_groups, len(layout.runs.groups)) == (10, 4, 1)
    assert layout.runs.padding <= 0.25


def test_a_row_that_is_wider_than_the_page_of_a_layer_has_the_page_of_two():
    """As in Nemotron 3 Nano with an 8-bit cache: the inputs of a convolution have 12,288 bytes."""
    coded = FullSpec(2, 128, torch.float8_e4m3fn)
    layout = CacheLayout([coded] * 6 + [spec_of(64, 64, 128, 6144)] * 23, 16)
    assert coded.block_bytes(16) == 8448
    assert layout.page_bytes == (2 * 8448,) * 3
    assert layout.token_groups == 1
    assert layout.runs.padding < 0.1


def test_models_that_cache_no_tokens_have_pages_as_their_states_suggest():
    """As in Mamba 2.8B: 5,120 channels of 16 numbers, and inputs of a convolution."""
    spec = StateSpec((Part(5120, 16, F32), Part(3, 5120, BF16)), (Part(1, 5120, BF16), Part(1, 5152, F32)), 16, 20)
    layout = CacheLayout([spec] * 64, 16)
    assert (layout.num_buffers, layout.token_groups, len(layout.groups)) == (64, 0, 1)
    assert layout.tables == [(kinds.STATE, 16)]
    assert spec.widest <= layout.runs.page_bytes <= 65536
    assert layout.runs.padding < 0.05
    assert layout.blocks_for(1, 1) == layout.blocks_for(10**6, 64) == layout.runs.row_blocks


def test_each_layer_with_a_state_has_pages_of_its_own_in_every_block():
    spec = StateSpec((Part(4, 16, F32), Part(3, 24, F32)), (Part(1, 64, F32),), 1, 3)
    layout = layout_of(FullSpec(1, 8, F32), spec, 4, 8, block_size=4)
    caches = layout.allocate(1 + layout.runs.state_blocks, poison=True)
    states = [number for number in range(8) if number % 4 != 3]
    assert all((caches[number][0] == 0xFF).all() for number in states)
    for number in states:
        (pages,) = caches[number]
        assert pages.shape == (1 + layout.runs.state_blocks, layout.runs.page_bytes)
        group = layout.runs.groups[layout.group_of[number] - layout.token_groups]
        assert number in group.layers
        pages[1 + layout.group_of[number]].fill_(number)
    for number in states:
        assert (caches[number][0][1 + layout.group_of[number]] == number).all()


def test_columns_of_the_table_of_runs_have_room_for_states_and_tails():
    small, large = spec_of(2, 8, 16, 64), spec_of(16, 64, 128, 64, ring=512)
    runs = CacheLayout([FullSpec(2, 64, BF16)] * 2 + [large] * 4 + [small] * 2, 16).runs
    assert [group.layers for group in runs.groups] == [(2, 3), (4, 5), (6, 7)]
    assert [group.columns > group.state_pages for group in runs.groups] == [True, True, False]
    assert all(group.columns == max(group.state_pages, group.tail_pages) for group in runs.groups)
    assert [group.first_column for group in runs.groups] == [0, runs.groups[0].columns, 2 * runs.groups[0].columns]
    assert runs.columns == sum(group.columns for group in runs.groups) >= max(runs.state_blocks, runs.tail_blocks)


def test_padding_of_runs_is_logged(caplog):
    with caplog.at_level(logging.INFO, "omniloop.engine"):
        layout_of(FullSpec(2, 256, BF16), spec_of(32, 128, 128, 8192), 4, 40)
    assert "a state of 64.39 MB in 198 blocks, 0.8% of them padding; a tail of" in caplog.text


def test_too_much_padding_of_runs_is_refused_with_sizes_that_fit():
    attention = FullSpec(4, 128, BF16)
    small = StateSpec((Part(64, 128, BF16),), (Part(1, 256, BF16),), 16, 20)
    with pytest.raises(ConfigError, match=r"--block-size 64: 89% of the .* padding \(at most 25%\); what .*-size 8$"):
        CacheLayout([attention, small], 64)
    assert CacheLayout([attention, small], 8).runs.padding <= 0.25
    tiny = StateSpec((Part(1, 16, F32),), (Part(1, 16, F32),), 16, 20)
    with pytest.raises(ConfigError, match="no size of a block fits: this model's mixture of layers is not supported"):
        CacheLayout([attention, tiny], 16)


def test_a_row_that_fits_into_no_page_is_refused_with_sizes_that_fit():
    wide = StateSpec((Part(512, 4096, F32),), (Part(1, 4096, F32),), 16, 18)
    with pytest.raises(ConfigError, match=r"has 16,384 bytes, more than a page of 4,096; what fits: --block-size 64$"):
        CacheLayout([FullSpec(2, 32, BF16), wide], 16)


def test_a_state_is_no_kind_of_block_tables():
    kind = CacheKind(kinds.STATE, 16)
    assert not kind.has_tables
    assert not kind.lasts
    spec = spec_of(32, 128, 128, 8192, ring=20)
    assert spec.kind == kind
    assert spec.block_bytes(16) == 0
    assert captured_of(spec) == "caches a state of 2,146,304 bytes, and of the last 20 tokens 32,768 bytes each"
