"""Paged and dense attention against float64; a query's bits depend only on its own position, keys and values."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from _fast import cpu
from engine.attention.meta import AttentionMeta
from engine.kernels.attention import prefill
from engine.kernels.attention.decode import PREFETCH, blocks_prefetched, tuned
from engine.kernels.attention.dense import dense_attention, dense_attention_reference
from engine.kernels.attention.paged import paged_attention, paged_attention_reference
from engine.kernels.attention.tiles import has_large_tiles
from engine.kernels.attention.work import PARTS_OF_CODES
from engine.kernels.target import Target
from tests.kernels.one_run import in_one_run

pytestmark = pytest.mark.usefixtures("isa")
DTYPES = [torch.float32, torch.bfloat16]


class Pages:
    """A cache of random keys and values, whose rows are scattered over shuffled blocks; unused memory is NaN."""

    def __init__(self, lengths, kv_heads, dim, block_size, dtype):
        counts = [-(-n // block_size) for n in lengths]
        total = sum(counts) + 3
        self.k = torch.full((total, kv_heads, block_size, dim), float("nan")).to(dtype)
        self.v = self.k.clone()
        order = torch.randperm(total).tolist()
        self.lengths = list(lengths)
        self.tables = torch.full((len(lengths), max(counts) + 2), -7, dtype=torch.int32)
        for row, (length, count) in enumerate(zip(lengths, counts)):
            blocks = [order.pop() for _ in range(count)]
            self.tables[row, :count] = torch.tensor(blocks)
            for i, block in enumerate(blocks):
                used = min(block_size, length - i * block_size)
                self.k[block, :, :used] = torch.randn(kv_heads, used, dim)
                self.v[block, :, :used] = torch.randn(kv_heads, used, dim)

    def meta(self, queries, rows=None, lengths=None):
        """Metadata of the rows (default: all); each row's queries are at the end of its `lengths` (default: all)."""
        rows = list(range(len(self.lengths))) if rows is None else rows
        lengths = [self.lengths[r] for r in rows] if lengths is None else lengths
        starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
        return AttentionMeta(
            query_start=starts,
            context_len=torch.tensor(lengths, dtype=torch.int32),
            block_tables=self.tables[rows].contiguous(),
            slot_mapping=torch.zeros(int(starts[-1]), dtype=torch.int64),
        )


def close(actual, expected, dtype):
    rtol, atol = (1e-4, 1e-5) if dtype == torch.float32 else (1e-2, 1e-2)
    torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"window": 40}, {"window": 700}, {"window": -40}, {"softcap": 3.0}])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size"),
    [(4, 2, 64, 16), (3, 3, 16, 4), (7, 1, 80, 16), (8, 8, 20, 32), (2, 1, 256, 16), (2, 1, 512, 16), (64, 1, 32, 8)],
)
def test_paged_attention_equals_its_reference(heads, kv_heads, dim, block_size, options, dtype):
    pages = Pages([1, 130, 77, 600, 64], kv_heads, dim, block_size, dtype)
    meta = pages.meta([1, 1, 77, 50, 3])
    q = torch.randn(132, heads, dim).to(dtype)
    actual = paged_attention(q, pages.k, pages.v, meta, dim**-0.5, **options)
    # The reference multiplies hidden values by zero, so it must not get the NaN after the last key.
    k, v = pages.k.double().nan_to_num(), pages.v.double().nan_to_num()
    close(actual, paged_attention_reference(q.double(), k, v, meta, dim**-0.5, **options), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("everywhere", [False, True], ids=["items", "prompt"])
@pytest.mark.parametrize("options", [{}, {"window": 40}, {"softcap": 3.0}])
def test_tokens_of_a_bidirectional_span_see_each_other(options, everywhere, dtype):
    """Two prompts, a row with one token, and a chunk whose first and last tokens belong to no span."""
    lengths, queries, dim = [200, 130, 77, 600], [200, 1, 77, 50], 64
    joints = [(0, 0, 200), (201, 0, 70)] if everywhere else [(0, 20, 120), (0, 130, 140), (201, 3, 77), (278, 552, 590)]
    pages = Pages(lengths, 2, dim, 16, dtype)
    last_keys = torch.cat([torch.arange(end - count, end) for end, count in zip(lengths, queries)]).to(torch.int32)
    for at, first, behind in joints:
        at += first - (550 if first > 500 else 0)
        last_keys[at : at + behind - first] = ~(behind - 1) if everywhere else behind - 1
    meta = replace(pages.meta(queries), last_keys=last_keys)
    q = torch.randn(sum(queries), 4, dim).to(dtype)
    k, v = pages.k.double().nan_to_num(), pages.v.double().nan_to_num()
    want = paged_attention_reference(q.double(), k, v, meta, dim**-0.5, **options)
    got = paged_attention(q, pages.k, pages.v, meta, dim**-0.5, **options)
    close(got, want, dtype)
    plain = paged_attention(q, pages.k, pages.v, replace(meta, last_keys=None), dim**-0.5, **options)
    assert torch.equal(got[200], plain[200]), "a token that sees up to itself has the bits that it has elsewhere"
    assert not torch.equal(got[30], plain[30])


@pytest.mark.parametrize("threads", [1, 8])  # with 8 threads, each computes segments of the long context
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"window": 40}, {"softcap": 3.0}])
def test_sinks_join_the_sum_once_and_have_no_value(options, dtype, threads):
    cpu.set_num_threads(threads)
    lengths, heads, dim = [1, 130, 1100], 6, 48
    pages = Pages(lengths, 2, dim, 16, dtype)
    meta, q = pages.meta([1, 30, 1]), torch.randn(32, heads, dim).to(dtype)
    sinks = torch.tensor([0.0, 2.5, -3.0, 40.0, -200.0, float("-inf")])
    k, v = pages.k.double().nan_to_num(), pages.v.double().nan_to_num()
    want = paged_attention_reference(q.double(), k, v, meta, dim**-0.5, **options, sinks=sinks)
    close(paged_attention(q, pages.k, pages.v, meta, dim**-0.5, **options, sinks=sinks), want, dtype)
    # The first row has one key: its weight is the softmax over two logits, the key's and the sink's.
    block = pages.tables[0, 0].long()
    key, value = (cache[block, :, 0].repeat_interleave(3, 0) for cache in (k, v))
    score = (q[0].double() * key).sum(1) * dim**-0.5
    if "softcap" in options:
        score = 3.0 * torch.tanh(score / 3.0)
    close(want.view(32, heads, dim)[0], torch.sigmoid(score - sinks)[:, None] * value, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"window": 100}, {"window": -100}, {"softcap": 5.0}])
def test_a_chunk_gets_the_same_bits_as_the_whole(options, dtype):
    length, dim = 700, 48
    pages = Pages([length], 2, dim, 16, dtype)
    q = torch.randn(length, 4, dim).to(dtype)
    whole = paged_attention(q, pages.k, pages.v, pages.meta([length]), 0.15, **options)
    for first, last in ((0, 1), (5, 70), (63, 64), (64, 65), (300, 513), (511, 512), (512, 513), (650, 700)):
        meta = pages.meta([last - first], lengths=[last])
        part = paged_attention(q[first:last], pages.k, pages.v, meta, 0.15, **options)
        assert torch.equal(part, whole[first:last]), (first, last)


def test_a_row_gets_the_same_bits_in_any_batch_and_with_any_number_of_threads():
    lengths = [9, 1100, 64, 2000, 333, 65]
    pages = Pages(lengths, 2, 64, 16, torch.float32)
    q = torch.randn(len(lengths), 8, 64)
    results = []
    for threads in (1, 2, 3):
        cpu.set_num_threads(threads)
        results.append(paged_attention(q, pages.k, pages.v, pages.meta([1] * len(lengths)), 0.125))
        for row in range(len(lengths)):
            alone = paged_attention(q[row : row + 1], pages.k, pages.v, pages.meta([1], [row]), 0.125)
            assert torch.equal(alone, results[0][row : row + 1])
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_rows_without_tokens_are_skipped_and_tables_are_found_by_table_row():
    pages = Pages([40, 90, 200], 2, 32, 16, torch.float32)
    q = torch.randn(8, 4, 32)
    want = paged_attention(q[:7], pages.k, pages.v, pages.meta([1, 5, 1]), 0.2)
    meta = pages.meta([1, 5, 1])
    starts, lengths = torch.tensor([0, 0, 1, 6, 7, 7], dtype=torch.int32), torch.tensor([0, 40, 90, 200, 0])
    order = [3, 2, 0, 1, 3]
    tables = torch.full((4, pages.tables.shape[1]), -7, dtype=torch.int32)
    tables[order[1:4]] = pages.tables
    meta = replace(
        meta,
        query_start=starts,
        context_len=lengths.to(torch.int32),
        block_tables=tables,
        table_row=torch.tensor(order, dtype=torch.int32),
    )
    assert torch.equal(paged_attention(q, pages.k, pages.v, meta, 0.2)[:7], want)  # the eighth token is padding
    reference = paged_attention_reference(q, pages.k.nan_to_num(), pages.v.nan_to_num(), meta, 0.2)
    close(reference[:7], want.double(), torch.float32)


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_before_the_first_key_are_hidden(dtype, window):
    pages = Pages([40, 2, 300], 2, 32, 16, dtype)
    q = torch.randn(3, 4, 32).to(dtype)
    meta = replace(pages.meta([1, 1, 1]), first_key=1)
    pages.k[pages.tables[:, 0].long(), :, 0] = pages.v[pages.tables[:, 0].long(), :, 0] = float("nan")
    got = paged_attention(q, pages.k, pages.v, meta, 0.2, window)
    close(
        got, paged_attention_reference(q, pages.k.nan_to_num(), pages.v.nan_to_num(), meta, 0.2, window).double(), dtype
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("queries", [[1, 1], [40, 1]])
def test_blocks_of_all_layers_in_one_run_give_the_same_bits(queries, dtype):
    pages = Pages([1100, 70], 2, 32, 16, dtype)
    q = torch.randn(sum(queries), 4, 32).to(dtype)
    keys, values, _ = in_one_run(pages.k, pages.v)
    got = paged_attention(q, keys, values, pages.meta(queries), 0.2, window=300)
    assert torch.equal(got, paged_attention(q, pages.k, pages.v, pages.meta(queries), 0.2, window=300))


def test_scattered_blocks_give_the_same_bits_as_blocks_in_order():
    pages = Pages([200], 2, 32, 16, torch.float32)
    used = pages.tables[0, :13].long()
    q = torch.randn(1, 2, 32)
    scattered = paged_attention(q, pages.k, pages.v, pages.meta([1]), 0.2)
    pages.tables = torch.arange(13, dtype=torch.int32)[None]
    k, v = pages.k[used].contiguous(), pages.v[used].contiguous()
    assert torch.equal(paged_attention(q, k, v, pages.meta([1]), 0.2), scattered)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("causal", "window"), [(False, 0), (True, 0), (False, 65), (False, 1)])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 64), (2, 1, 80), (3, 3, 12)])
def test_dense_attention_equals_its_reference(heads, kv_heads, dim, causal, window, dtype):
    rows = 700
    fused = torch.randn(rows, (heads + 2 * kv_heads) * dim).to(dtype)
    q, k, v = (part.unflatten(1, (-1, dim)) for part in fused.split([heads * dim, kv_heads * dim, kv_heads * dim], 1))
    bounds = torch.tensor([0, 1, 65, 65, 640, 700], dtype=torch.int32)
    actual = dense_attention(q, k, v, bounds, dim**-0.5, causal, window=window)
    expected = dense_attention_reference(q.double(), k.double(), v.double(), bounds, dim**-0.5, causal, window=window)
    close(actual, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "reach"), [(3, 700), (1, 7)])
def test_a_bias_by_distance_is_added_to_scores(kv_heads, reach, dtype):
    q, k, v = (torch.randn(700, heads, 20).to(dtype) for heads in (3, kv_heads, kv_heads))
    bounds, bias = torch.tensor([0, 1, 65, 65, 640, 700], dtype=torch.int32), torch.randn(3, 2 * reach + 1) * 3
    expected = dense_attention_reference(q.double(), k.double(), v.double(), bounds, 0.2, bias=bias)
    close(dense_attention(q, k, v, bounds, 0.2, bias=bias), expected, dtype)
    row = torch.arange(64)  # the second segment, as one row of torch
    raised = bias[:, (row - row[:, None]).clamp(-reach, reach) + reach].double()
    mine = [part[1:65].double().movedim(0, 1) for part in (q, k, v)]
    plain = torch.nn.functional.scaled_dot_product_attention(*mine, raised, scale=0.2, enable_gqa=True)
    torch.testing.assert_close(expected[1:65], plain.movedim(0, 1).reshape(64, 60))


def test_a_segment_gets_the_same_bits_alone():
    q, k, v = (torch.randn(300, 2, 40) for _ in range(3))
    whole = dense_attention(q, k, v, torch.tensor([0, 100, 290, 300]), 0.2)
    alone = dense_attention(q[100:290], k[100:290], v[100:290], torch.tensor([0, 190]), 0.2)
    assert torch.equal(alone, whole[100:290])


def test_large_scores_do_not_overflow():
    pages = Pages([100], 1, 16, 16, torch.float32)
    q = torch.randn(1, 1, 16) * 1e4
    out = paged_attention(q, pages.k, pages.v, pages.meta([1]), 1.0)
    k, v = pages.k.double().nan_to_num(), pages.v.double().nan_to_num()
    close(out, paged_attention_reference(q.double(), k, v, pages.meta([1]), 1.0), torch.float32)


@pytest.mark.parametrize(
    ("rows", "kv_heads", "narrow", "wide"),
    [
        (1, 8, (4, 4, 0), (4, 4, 0)),
        (8, 8, (4, 4, 0), (4, 4, 0)),
        (9, 8, (4, 4, 5), (4, 4, 5)),
        (28, 8, (4, 4, 5), (4, 4, 5)),
        (29, 8, (4, 3, 3), (4, 4, 5)),
        (32, 8, (4, 3, 3), (4, 4, 5)),
        (33, 8, (8, 3, 3), (8, 4, 5)),
        (34, 8, (8, 4, 5), (8, 4, 5)),
        (65, 4, (4, 3, 3), (4, 4, 5)),
        (66, 4, (8, 3, 3), (8, 4, 5)),
        (2048, 8, (8, 4, 5), (8, 4, 5)),
    ],
)
def test_decode_launches_more_programs_than_fit_where_rows_are_many(rows, kv_heads, narrow, wide):
    card = Target("cuda", "sm_90", 132, 32, 227 << 10)
    pairs = rows * kv_heads
    for width, want in ((2048, narrow), (4096, wide)):
        share, lead, options = tuned(card, pairs, width, 16, 128, 2)
        assert (share, options["num_stages"], lead) == want
        assert options["num_warps"] == 1
        # A card on which no kernel starts before the previous one ends.
        old = Target("cuda", "sm_80", 132, 32, 163 << 10)
        assert tuned(old, pairs, width, 16, 128, 2) == (share, 0, options)
        of_codes, _, options = tuned(card, pairs, width, 16, 128, 2, codes=True)  # as many programs as parts
        assert (of_codes, options) == (PARTS_OF_CODES, {"num_warps": 1, "num_stages": 3})
    other = Target("hip", "gfx942", 132, 64, 64 << 10)  # on this card each stage costs registers
    assert tuned(other, pairs, 2048, 16, 128, 2) == (share, 0, {"num_warps": 1, "num_stages": 2})
    for dim, size in ((256, 2), (128, 4)):
        share, _, options = tuned(card, pairs, 2048, 16, dim, size)
        assert (share, options) == (wide[0], {"num_warps": 4, "num_stages": 2})


@pytest.mark.parametrize(
    ("pairs", "heads", "dim", "block", "prefetched"),
    [
        (8, 16, 128, 16, PREFETCH),
        (448, 8, 256, 16, PREFETCH),
        (449, 8, 256, 16, 0),
        (8, 7, 80, 16, PREFETCH),
        (8, 32, 128, 16, 0),
        (8, 17, 128, 16, 0),
        (8, 3, 10, 2, 0),
    ],
)
def test_decode_asks_early_for_keys_where_queries_are_narrow_and_kernels_overlap(pairs, heads, dim, block, prefetched):
    cards = [Target("cuda", arch, 132, 32, 227 << 10) for arch in ("sm_90", "sm_100")]
    assert [blocks_prefetched(card, pairs, heads * dim, block * dim * 2) for card in cards] == [prefetched, prefetched]
    others = [Target("cuda", "sm_80", 108, 32, 163 << 10), Target("hip", "gfx942", 304, 64, 64 << 10)]
    assert [blocks_prefetched(card, pairs, heads * dim, block * dim * 2) for card in others] == [0, 0]


def test_decode_over_codes_asks_early_for_keys_where_kernels_overlap():
    for arch, most in (("sm_90", PREFETCH), ("sm_100", PREFETCH), ("sm_80", 0)):
        card = Target("cuda", arch, 132, 32, 227 << 10)
        assert [blocks_prefetched(card, pairs, 4096, 16 * 128, codes=True) for pairs in (8, 2048)] == [most, most]
        assert blocks_prefetched(card, 8, 4096, 2 * 10, codes=True) == 0


def test_prompts_have_large_tiles_where_half_as_many_fill_the_device():
    card = Target("cuda", "sm_90", 132, 32, 227 << 10)
    taken = [prefill.takes_large(card, 128, 2, tokens // 32 * 8) for tokens in (512, 1024, 1312, 1344, 8192)]
    assert taken == [False, False, False, True, True]
    assert not prefill.takes_large(card, 256, 2, 2048)
    assert not prefill.takes_large(card, 128, 4, 2048)
    keys = {prefill.tuned(card, 128, 2, count, large)[0] for count in (8, 2048) for large in (False, True)}
    assert len(keys) == 1  # a token's bits depend on the number of keys per iteration
    others = [Target("cuda", "sm_100", 148, 32, 227 << 10), Target("hip", "gfx950", 256, 64, 160 << 10)]
    assert [has_large_tiles(device, 128) for device in (card, *others)] == [True, False, False]
    assert not has_large_tiles(card, 256)
