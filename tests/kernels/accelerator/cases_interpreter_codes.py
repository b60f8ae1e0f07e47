"""An 8-bit KV cache in the interpreter: store, decode and prefill, against float64 over the stored codes."""

from dataclasses import replace

import pytest
import torch
import triton

from engine.cache.tokens import FullSpec
from engine.kernels.attention import decode as decode_attention
from engine.kernels.attention import prefill
from engine.kernels.attention.paged import launch_paged, paged_attention_reference
from engine.kernels.attention.work import empty_list, launch_list
from engine.kernels.float8 import E4M3_UNITS, E5M2, narrow8, widen8
from engine.kernels.pages import decode, encode, pages_of
from engine.kernels.rotate import launch_qkv, qkv_rope_store_reference
from engine.kernels.target import tl
from tests.kernels.accelerator.cases_interpreter import STEPS, error, pages

KINDS = ["made", "given", "e5m2"]
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero|All-NaN):RuntimeWarning")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def cache_of(kind, kv_heads, dim, block_size, num_blocks):
    given = (tuple(0.5 + h for h in range(kv_heads)), tuple(2.0 - h / 8 for h in range(kv_heads)))
    dtype = torch.float8_e5m2 if kind == "e5m2" else torch.float8_e4m3fn
    spec = FullSpec(kv_heads, dim, dtype, given=given if kind == "given" else None)
    size = -(-spec.block_bytes(block_size) // 16) * 16 + 32
    return pages_of(spec.views(torch.full((num_blocks, size), 255, dtype=torch.uint8), block_size))


@triton.jit
def round_trip_kernel(codes_out, values_out, values, codes, CODES: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.store(codes_out + place, narrow8(tl.load(values + place), CODES))
    tl.store(values_out + place, widen8(tl.load(codes + place), tl.float32, CODES))


@pytest.mark.parametrize("form", [1, E5M2, E4M3_UNITS])
def test_every_code_is_widened_and_every_number_rounded_as_torch_does(form):
    dtype = torch.float8_e5m2 if form == E5M2 else torch.float8_e4m3fn
    most = torch.finfo(dtype).max
    codes = torch.arange(256, dtype=torch.uint8)
    exact = codes.view(dtype).float()
    finite = exact[exact.isfinite()].sort().values
    between = (finite[1:] + finite[:-1]) / 2  # ties
    odd = torch.tensor([0.0, -0.0, 1e-30, most, 1.03 * most, 1e30, -1e30, float("nan"), float("inf"), -float("inf")])
    values = torch.cat([between, between * 1.001, exact[exact.isfinite()], odd])
    values = torch.nn.functional.pad(values, (0, 1024 - len(values)))
    got, widened = torch.empty(1024, dtype=torch.uint8), torch.empty(1024)
    round_trip_kernel[(1,)](got, widened, values, codes.repeat(4), CODES=form, BLOCK=1024)
    # Infinities of e5m2 are never stored. The interpreter's own cast from e4m3 does not convert NaN.
    told = exact.isfinite() if form == E4M3_UNITS else ~exact.isinf()
    torch.testing.assert_close(widened[:256][told], exact[told], rtol=0, atol=0, equal_nan=True)
    want = values.clamp(-most, most).masked_fill(~values.isfinite(), float("nan")).to(dtype)
    number = want.float().isfinite()
    assert torch.equal(got[number], want.view(torch.uint8)[number])
    assert bool((got[~number] & 0x7F == 0x7F).all())


@pytest.mark.parametrize(("dim", "half", "norm"), [(64, 32, "early"), (80, 40, None), (96, 24, "late")])
@pytest.mark.parametrize("kind", KINDS)
def test_store(kind, dim, half, norm):
    tokens, heads, kv_heads, block_size = 6, 6, 2, 4
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim)
    qkv[0] *= 500
    qkv[1] = 0
    qkv[5, heads * dim + 3] = float("nan")
    angle = torch.randn(tokens, half)
    weights = (torch.randn(dim), torch.randn(dim)) if norm else (None, None)
    got, want = (cache_of(kind, kv_heads, dim, block_size, 4) for _ in range(2))
    slots = torch.tensor([3, 4, -1, 15, 9, 8])
    args = (qkv, angle.cos(), angle.sin(), *weights, 1e-6, heads, kv_heads, dim)
    launch_qkv(*args, got[0], got[1], slots, norm == "late", got[2])
    qkv_rope_store_reference(*args, want[0], want[1], slots, norm == "late", want[2])
    for number in range(2):
        ours, theirs = (decode(cache[number], cache[2] and cache[2][number], torch.float64) for cache in (got, want))
        assert torch.equal(ours.isnan(), theirs.isnan())  # unwritten places, and a head with NaN
        # A number that the rotation rounds differently may get a neighbouring code.
        differ = (ours - theirs).abs() > 1e-5 * theirs.abs()
        assert differ.double().mean() < 0.01
        assert bool(((ours - theirs).abs() <= theirs.abs() * (0.26 if kind == "e5m2" else 0.13) + 1e-3)[differ].all())
        if got[2]:
            torch.testing.assert_close(got[2][number], want[2][number], rtol=1e-6, atol=0, equal_nan=True)


def test_stored_values_are_within_a_sixteenth_with_keys_up_to_two_thousand():
    keys = torch.randn(16, 2, 64).clamp(-3, 3)
    keys[:, :, 5] *= 2000 / 3
    k, v, scales = cache_of("made", 2, 64, 16, 1)
    qkv = torch.cat([torch.zeros(16, 2, 64), keys, keys], 1).flatten(1)
    nothing = torch.ones(16, 32), torch.zeros(16, 32)
    launch_qkv(qkv, *nothing, None, None, 0.0, 2, 2, 64, k, v, torch.arange(16), scales=scales)
    got = decode(k, scales[0], torch.float32)[0].transpose(0, 1)
    least = (
        keys.abs().amax(-1, keepdim=True) / 448 * 2.0**-9
    )  # half of the smallest code, times less than twice the scale
    assert bool(((got - keys).abs() <= torch.maximum(keys.abs() / 16, least) * 1.001).all())
    ones = torch.where(keys.abs() > 448, 448.0, keys.abs()).to(torch.float8_e4m3fn).float()
    assert not bool(((ones - keys.abs()).abs() <= torch.maximum(keys.abs() / 16, least) * 1.001).all())


def coded(kind, k_cache, v_cache):
    """A quantised cache with these numbers; places with NaN stay unwritten."""
    num_blocks, kv_heads, block_size, dim = k_cache.shape
    k, v, scales = cache_of(kind, kv_heads, dim, block_size, num_blocks)
    block, offset = (k_cache[:, 0, :, 0] == k_cache[:, 0, :, 0]).nonzero(as_tuple=True)
    for number, (numbers, cache) in enumerate(((k_cache, k), (v_cache, v))):
        encode(numbers[block, :, offset], cache, scales and scales[number], block, offset)
    return k, v, scales


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (24, 0.0), (0, 5.0)])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 32), (7, 1, 80), (4, 1, 128)])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sunk", [False, True])
def test_attention(sunk, kind, step, heads, kv_heads, dim, window, softcap, dtype):
    contexts, queries = STEPS[step]
    *numbers, meta = pages(contexts, queries, kv_heads, dim, 16, torch.float32)
    k, v, scales = coded(kind, *numbers)
    q = torch.randn(sum(queries), heads, dim).to(dtype)
    work = empty_list(8, sum(queries), 16, heads, dim, "cpu")
    launch_list(work, meta, heads // kv_heads, False)
    options = (dim**-0.5, window, softcap, torch.randn(heads) * 2 if sunk else None, scales)
    out = launch_paged(q, k, v, replace(meta, work=work), *options)
    want = paged_attention_reference(q.double(), k, v, meta, *options).view_as(out)
    assert error(out, want) < (1e-5 if dtype is torch.float32 else 4e-3)


@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize("kind", KINDS)
def test_queries_and_values_of_any_size(kind, queries):
    """A query of zeros sees no hidden key; scales of values 2^40 apart exceed float16's range."""
    *numbers, meta = pages([70], [queries], 2, 32, 16, torch.float32)
    if kind == "made" and queries == 1:
        numbers[1] *= 2.0 ** torch.arange(-20, 20).repeat(16)[: 16 * len(numbers[1])].view(-1, 1, 16, 1)
    k, v, scales = coded(kind, *numbers)
    q = torch.randn(queries, 4, 32).half()
    q[:, 0], q[:, 1] = 0, q[:, 1] * 2000
    q[:, 2] *= 2.0**-12
    work = empty_list(8, queries, 16, 4, 32, "cpu")
    launch_list(work, meta, 2, False)
    out = launch_paged(q, k, v, replace(meta, work=work), 0.2, 0, 0.0, None, scales)
    want = paged_attention_reference(q.double(), k, v, meta, 0.2, 0, 0.0, None, scales).view_as(out)
    for head in range(4):
        assert error(out[:, head], want[:, head]) < 1e-3


@pytest.mark.parametrize("kind", ["made", "e5m2"])
def test_many_parts_are_added_in_runs_of_them(kind, monkeypatch):
    """Rows with 9, 1, 2 and 3 parts of 64 keys, added in runs of 2: a row of five runs, the last with one part."""
    monkeypatch.setattr(decode_attention, "MERGED", 1)
    contexts = [9 * 64 - 5, 40, 100, 190]
    *numbers, meta = pages(contexts, [1] * 4, 2, 32, 16, torch.float32)
    k, v, scales = coded(kind, *numbers)
    q = torch.randn(4, 4, 32)
    work = empty_list(4, 4, 24, 4, 32, "cpu", 200)
    launch_list(work, meta, 2, False)
    assert work.parts[: int(work.num_parts), 5:7].unique(dim=0).diff().tolist() == [[9], [1], [2], [3]]
    for _ in range(2):
        out = launch_paged(q, k, v, replace(meta, work=work), 0.2, 0, 0.0, None, scales)
        want = paged_attention_reference(q.double(), k, v, meta, 0.2, 0, 0.0, None, scales).view_as(out)
        assert error(out, want) < 1e-5
        assert not work.arrived.any()


def test_a_prompts_numbers_times_their_scales_have_the_bits_of_scores_and_weights_times_them():
    *numbers, meta = pages([40, 33], [40, 20], 2, 32, 16, torch.float32)
    k, v, made = coded("made", *numbers)
    given = cache_of("given", 2, 32, 16, len(k))[2]
    # `made`: per token and head, multiplied into keys and values; `given`: per head, into scores and weights.
    for scale in (*made, *given):
        scale.as_strided(scale.size(), scale.stride()).fill_(2.0**-7)
    q = torch.randn(60, 4, 32)
    work = empty_list(8, 60, 16, 4, 32, "cpu")
    launch_list(work, meta, 2, False)
    meta = replace(meta, work=work)
    found, want = (launch_paged(q, k, v, meta, 0.2, 0, 0.0, None, scales).clone() for scales in (made, given))
    assert torch.equal(found, want)


@pytest.mark.parametrize("kind", ["made", "e5m2"])
def test_an_invariant_list_gives_a_token_the_same_bits_however_its_prompt_was_cut(kind, ordered_sums, monkeypatch):
    """The bits do not depend on the size of the tile either."""
    *numbers, meta = pages([150], [150], 2, 32, 16, torch.float32)
    k, v, scales = coded(kind, *numbers)
    q = torch.randn(150, 4, 32)

    def attend(first, last, large):
        monkeypatch.setattr(prefill, "takes_large", lambda *_: large)
        starts, length = torch.tensor([0, last - first], dtype=torch.int32), torch.tensor([last], dtype=torch.int32)
        part = replace(meta, query_start=starts, context_len=length, decode_only=False)
        work = empty_list(1, 150, 2, 4, 32, "cpu", large=True)
        launch_list(work, part, 2, True)
        assert work.num_large_tiles is not None
        assert (int(work.num_tiles), int(work.num_large_tiles)) == (-(-(last - first) // 64), -(-(last - first) // 128))
        (work.tiles if large else work.large_tiles).fill_(-1 << 20)  # the launch does not read these tiles
        return launch_paged(q[first:last].contiguous(), k, v, replace(part, work=work), 0.2, 0, 0.0, None, scales)

    whole = attend(0, 150, False)
    for first, last in ((0, 1), (3, 70), (64, 66), (149, 150)):
        assert torch.equal(attend(first, last, False), whole[first:last]), (first, last)
    for first, last in ((0, 150), (2, 132)):
        assert torch.equal(attend(first, last, True), whole[first:last]), (first, last)
