"""Verification of drafts, drafts that copy from texts, and attention of verify steps, on a real GPU against the
references."""

import copy
from dataclasses import fields, is_dataclass, replace

import pytest
import torch

from _fast.layout import SlotWord
from engine.kernels.attention.paged import paged_attention, paged_attention_reference
from engine.kernels.attention.tiles import stripe_of
from engine.kernels.attention.work import empty_list, fill_list, max_parts
from engine.kernels.drafts_rows import DraftedRows
from engine.kernels.sampling.append import append, append_reference
from engine.kernels.sampling.drafts_home import UNREAD, send_drafts, send_drafts_reference
from engine.kernels.sampling.ngram import ngram, ngram_reference
from engine.kernels.sampling.replay import replay, replay_reference
from engine.kernels.sampling.suffix import empty_matches, suffix, suffix_reference
from engine.kernels.sampling.verify import verify, verify_reference
from engine.kernels.step_tensors import empty_slots
from engine.kernels.survivals import Survivals
from tests.kernels.drafts import chosen_runs, written_texts
from tests.kernels.test_on_device import pages

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")]


def there(of):
    """The same tensors on the device."""
    if isinstance(of, torch.Tensor):
        return of.cuda()
    if isinstance(of, DraftedRows):
        return DraftedRows(*(each if each is None or isinstance(each, int) else there(each) for each in of))
    named = ((field.name, getattr(of, field.name)) for field in fields(of))
    return replace(of, **{name: there(each) for name, each in named if is_dataclass(each) or torch.is_tensor(each)})


@pytest.mark.parametrize("sets", [False, True])
@pytest.mark.parametrize("number", [1, 4, 64])
def test_runs_equal_the_reference(number, sets):
    runs, slots, tables, inputs = chosen_runs(300, number)
    slots.seed[:] = 77 * torch.arange(301) - (1 << 62)
    survivals = torch.tensor([0.9**place for place in range(number)]) if sets else None
    mine = [there(each) for each in (runs, slots, tables)]
    theirs = copy.deepcopy((runs, slots, tables))
    verify(*mine, there(inputs), None if survivals is None else survivals.cuda())
    verify_reference(*theirs, inputs, survivals)
    assert torch.equal(mine[0].cpu(), theirs[0])
    assert torch.equal(mine[1].words.cpu(), theirs[1].words)
    assert torch.equal(mine[2].counts.cpu(), theirs[2].counts)
    assert torch.equal(mine[2].seen.cpu(), theirs[2].seen)
    for field in fields(Survivals):
        assert torch.equal(getattr(mine[1].survivals, field.name).cpu(), getattr(theirs[1].survivals, field.name))


@pytest.mark.parametrize(("least", "most"), [(1, 5), (2, 3), (3, 32)])
@pytest.mark.parametrize("number", [1, 4, 64])
def test_drafts_equal_the_reference(number, least, most):
    slots, texts, runs, row_slot = written_texts(200, number, 40_000)
    mine, near = (there(slots), there(texts)), (slots, texts)
    ngram(*mine, runs.cuda(), row_slot.cuda(), least, most)
    ngram_reference(*near, runs, row_slot, least, most)
    assert not mine[1].best.any()
    assert not mine[1].arrived.any()
    assert torch.equal(mine[0].words.cpu(), slots.words)
    assert torch.equal(mine[0].drafts.cpu(), slots.drafts)
    assert torch.equal(mine[1].tokens.cpu(), texts.tokens)


def test_replayed_drafts_equal_the_reference():
    slots, texts, runs, row_slot = written_texts(300, 4, 2000)
    slots.seed[:] = 77 * torch.arange(301) - (1 << 62)
    survivals, mine = torch.tensor([0.9, 0.6, 0.3, 0.1]), there(slots)
    replay(mine, texts.tokens.cuda(), runs.cuda(), row_slot.cuda(), survivals.cuda(), 4)
    replay_reference(slots, texts.tokens, runs, row_slot, survivals, 4)
    assert torch.equal(mine.words.cpu(), slots.words)
    assert torch.equal(mine.drafts.cpu(), slots.drafts)


def test_drafts_reach_the_host():
    slots, most = empty_slots(9, 1, 1, "cpu", 7), 5
    width = slots.drafts.shape[1]
    slots.drafts.random_(-1, 900)
    drafts, row_slot = torch.tensor([3, -1, 0, 7, 2], dtype=torch.int32), torch.tensor([4, 0, 8, 1, 2]).int()
    ring = torch.full((3, most, 1 + width), UNREAD, dtype=torch.int32).pin_memory()
    want = ring.clone()
    for home in (2, 0):
        number = torch.tensor([home], dtype=torch.int32)
        send_drafts(ring, number.cuda(), drafts.cuda(), row_slot.cuda(), there(slots))
        send_drafts_reference(want, number, drafts, row_slot, slots)
    torch.cuda.synchronize()
    assert torch.equal(ring, want)
    assert (ring[1] == UNREAD).all()


def test_appended_tokens_equal_the_reference():
    slots, texts, runs, row_slot = written_texts(300, 3, 2000)
    slots.word(SlotWord.PROMPT_LEN).copy_(torch.arange(301) % 99)
    lines = torch.arange(300, dtype=torch.int32) * runs.shape[1], row_slot, row_slot % 7
    lines[0][::5] = -1
    mine = texts.tokens.cuda()
    append(mine, there(slots), runs.cuda(), tuple(each.cuda() for each in lines))
    append_reference(texts.tokens, slots, runs, lines)
    assert torch.equal(mine.cpu(), texts.tokens)


@pytest.mark.parametrize(("depth", "factor", "least"), [(24, 1.0, 0.1), (5, 2.5, 0.4), (64, 0.5, 0.0)])
@pytest.mark.parametrize("number", [1, 16, 64])
def test_likely_paths_equal_the_reference(number, depth, factor, least):
    slots, texts, runs, row_slot = written_texts(200, number, 40_000)
    texts.tokens[50:100] %= 2  # more places match than are read
    texts.tokens[100:150] *= 977 * torch.arange(40_000, dtype=torch.int32) // 13  # few places match
    room = empty_matches(200, 40_000, depth, factor, number, "cpu")
    mine = there(slots), texts.tokens.cuda(), there(room), runs.cuda(), row_slot.cuda()
    suffix(*mine, least)
    suffix_reference(slots, texts.tokens, room, runs, row_slot, least)
    assert not mine[2].counts.any()
    assert torch.equal(mine[0].words.cpu(), slots.words)
    assert torch.equal(mine[1].cpu(), texts.tokens)
    lane = torch.arange(number) < slots.word(SlotWord.NUM_DRAFTS)[:, None]
    assert torch.equal(mine[0].drafts.cpu() * lane, slots.drafts * lane)


@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (64, 8), (16, 16)])
@pytest.mark.parametrize("window", [0, 1000])
@pytest.mark.parametrize("queries", [[4] * 6, [1, 8, 16, 3, 0, 40]])
def test_attention_in_stripes_equals_the_reference(heads, kv_heads, window, queries):
    contexts = [3000, 40, 9001, 5, 0, 512]
    contexts = [max(context, count) if count else 0 for context, count in zip(contexts, queries)]
    k_cache, v_cache, meta = pages(contexts, queries, kv_heads, 128)
    q = torch.randn(sum(queries), heads, 128, dtype=torch.bfloat16, device="cuda")
    group, rows = heads // kv_heads, len(queries)
    stripes = rows * -(-16 // stripe_of(group, 16))
    room = max_parts(10_000, 16, stripes)
    work = empty_list(stripes, sum(queries), room, heads, 128, "cuda", most_cut=16, group=group)
    fill_list(work, meta, group)
    for _ in range(2):
        got = paged_attention(q, k_cache, v_cache, replace(meta, work=work), 128**-0.5, window)
        want = paged_attention_reference(q.double(), k_cache, v_cache, meta, 128**-0.5, window)
        assert (got.double() - want).abs().max() < 2e-2
        assert not work.arrived.any()
