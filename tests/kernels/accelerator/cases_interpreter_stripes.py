"""Attention of verify steps in the interpreter: rows of few queries in stripes and parts, against the references."""

from dataclasses import replace

import pytest
import torch
import triton  # noqa: F401  (must precede the import of any kernel file; TRITON_INTERPRET sets the mode)

from engine.kernels.attention import decode
from engine.kernels.attention.paged import launch_paged, paged_attention, paged_attention_reference
from engine.kernels.attention.tiles import stripe_of, tile_tokens
from engine.kernels.attention.work import MIN_PART, empty_list, fill_list_reference, launch_list
from tests.kernels.accelerator.cases_interpreter import pages, sinks_of
from tests.kernels.accelerator.cases_interpreter_codes import coded

# Contexts and queries: rows without drafts, rows of one and of several stripes, a prompt, an unused row. Some contexts
# end behind a part's end, so that the first stripes of the row have no key in the last part.
CONTEXTS = [5, 3 * MIN_PART + 2, 0, 40, MIN_PART + 1, 30, 2 * MIN_PART + 7, 16]
QUERIES = [1, 4, 0, 7, 3, 30, 16, 16]
MOST = 16


def lists(meta, heads, kv_heads, dim, room=24, per_unit=2, invariant=False):
    """Work lists with stripes; `room` for parts beyond those of a single part for each stripe."""
    group, tokens = heads // kv_heads, int(meta.query_start[-1])
    stripes = len(meta.context_len) * -(-MOST // stripe_of(group, MOST))
    return empty_list(stripes, tokens, stripes + room, heads, dim, "cpu", per_unit, True, MOST, group)


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (24, 0.0), (-24, 0.0), (0, 5.0)])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 32), (8, 2, 16), (3, 1, 80), (16, 1, 16)])
@pytest.mark.parametrize("sunk", [False, True])
def test_attention(sunk, heads, kv_heads, dim, window, softcap, dtype):
    k_cache, v_cache, meta = pages(CONTEXTS, QUERIES, kv_heads, dim, 16, dtype)
    q = torch.randn(sum(QUERIES), heads, dim).to(dtype)
    work = lists(meta, heads, kv_heads, dim)
    launch_list(work, meta, heads // kv_heads, False)
    options = dim**-0.5, window, softcap, sinks_of(heads) if sunk and heads > 2 else None
    for _ in range(2):
        out = launch_paged(q, k_cache, v_cache, replace(meta, work=work), *options)
        want = paged_attention_reference(q.double(), k_cache, v_cache, meta, *options).view_as(out)
        assert (out.double() - want).abs().max() < (1e-5 if dtype is torch.float32 else 4e-3)
        assert not work.arrived.any()


@pytest.mark.covering(1)
@pytest.mark.parametrize("window", [0, 24])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 32), (16, 1, 16)])
@pytest.mark.parametrize("sunk", [False, True])
def test_attention_of_rows_whose_tokens_see_all_keys(sunk, heads, kv_heads, dim, window):
    """Rows of every number of queries are cut into parts, and no tiles are launched."""
    contexts = [5, 3 * MIN_PART + 2, 0, 40, MIN_PART + 1, 2 * MIN_PART + 7, 16]
    queries = [1, 4, 0, 7, 3, 16, 16]
    k_cache, v_cache, meta = pages(contexts, queries, kv_heads, dim, 16, torch.float32)
    q = torch.randn(sum(queries), heads, dim)
    work = lists(meta, heads, kv_heads, dim)
    meta = replace(meta, work=work, cut=True, whole=True)
    want = replace(meta, work=lists(meta, heads, kv_heads, dim))
    launch_list(work, meta, heads // kv_heads, False)
    fill_list_reference(want.work, meta, heads // kv_heads, False)
    parts = int(want.work.num_parts)
    assert (int(work.num_parts), int(work.num_tiles)) == (parts, 0)
    assert torch.equal(work.parts[:parts], want.work.parts[:parts])
    options = dim**-0.5, window, 0.0, sinks_of(heads) if sunk else None
    out = launch_paged(q, k_cache, v_cache, meta, *options)
    assert (out - paged_attention_reference(q, k_cache, v_cache, meta, *options).view_as(out)).abs().max() < 1e-5
    assert (out - paged_attention(q, k_cache, v_cache, meta, *options).view_as(out)).abs().max() < 1e-5


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", ["made", "e5m2"])
@pytest.mark.parametrize("window", [0, 24, -24])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 32), (8, 1, 32)])
def test_attention_over_codes(kind, window, heads, kv_heads, dim, monkeypatch):
    """Parts are added in runs of two, too."""
    monkeypatch.setattr(decode, "MERGED", 1)
    *numbers, meta = pages(CONTEXTS, QUERIES, kv_heads, dim, 16, torch.float32)
    k, v, scales = coded(kind, *numbers)
    q = torch.randn(sum(QUERIES), heads, dim)
    work = lists(meta, heads, kv_heads, dim, 80, 200)
    launch_list(work, meta, heads // kv_heads, False)
    options = 0.2, window, 0.0, None, scales
    out = launch_paged(q, k, v, replace(meta, work=work), *options)
    want = paged_attention_reference(q.double(), k, v, meta, *options).view_as(out)
    assert (out.double() - want).abs().max() < 1e-5
    assert not work.arrived.any()


@pytest.mark.parametrize("room", [1, 9, 60])
@pytest.mark.parametrize("group", [1, 4, 6, 8, 20])
@pytest.mark.parametrize("invariant", [False, True])
def test_work_lists(group, room, invariant):
    _, _, meta = pages(CONTEXTS, QUERIES, 1, 16, 16, torch.float32)
    got, want = (lists(meta, group, 1, 16, room) for _ in range(2))
    launch_list(got, meta, group, invariant)
    fill_list_reference(want, meta, group, invariant)
    parts, tiles = int(want.num_parts), int(want.num_tiles)
    assert (int(got.num_parts), int(got.num_tiles)) == (parts, tiles)
    assert torch.equal(got.parts[:parts], want.parts[:parts])
    assert torch.equal(got.tiles[:tiles], want.tiles[:tiles])
    assert parts <= len(want.parts)
    if invariant:
        assert parts == 0
        return
    # Every query of a row with few queries is in one stripe, whose parts cover the query's context.
    stripe, row_of = stripe_of(group, MOST), torch.arange(len(QUERIES)).repeat_interleave(torch.tensor(QUERIES))
    assert tiles == -(-30 // tile_tokens(group, 16)), "only the prompt has tiles"
    seen = torch.zeros(sum(QUERIES), dtype=torch.int64)
    for token, low, high, context, _, first, last, queries in want.parts[:parts].tolist():
        row = int(row_of[token])
        end = sum(QUERIES[: row + 1])
        assert 1 <= queries == min(stripe, end - token)
        assert context == CONTEXTS[row] - (end - token - queries)
        assert want.parts[first, 1] == 0
        assert max(want.parts[first:last, 2].tolist()) == context
        seen[token : token + queries] += max(high - low, 0)
    few = [QUERIES[row] <= MOST for row in row_of.tolist()]
    assert torch.equal(seen > 0, torch.tensor(few))
