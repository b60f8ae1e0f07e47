"""Verification of drafts, and drafts that copy from texts, on a real GPU against the references."""

import copy
from dataclasses import fields, replace

import pytest
import torch

from engine.kernels.sampling.ngram import ngram, ngram_reference
from engine.kernels.sampling.verify import verify, verify_reference
from tests.kernels.drafts import chosen_runs, written_texts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")]


def there(of):
    """The same tensors on the device."""
    if isinstance(of, torch.Tensor):
        return of.cuda()
    named = ((field.name, getattr(of, field.name)) for field in fields(of))
    return replace(of, **{name: each.cuda() for name, each in named if each is not None})


@pytest.mark.parametrize("number", [1, 4, 64])
def test_runs_equal_the_reference(number):
    runs, slots, tables, inputs = chosen_runs(300, number)
    mine = [there(each) for each in (runs, slots, tables)]
    theirs = copy.deepcopy((runs, slots, tables))
    verify(*mine, there(inputs))
    verify_reference(*theirs, inputs)
    assert torch.equal(mine[0].cpu(), theirs[0])
    assert torch.equal(mine[1].words.cpu(), theirs[1].words)
    assert torch.equal(mine[2].counts.cpu(), theirs[2].counts)
    assert torch.equal(mine[2].seen.cpu(), theirs[2].seen)


@pytest.mark.parametrize(("least", "most"), [(1, 5), (2, 3), (3, 32)])
@pytest.mark.parametrize("number", [1, 4, 64])
def test_drafts_equal_the_reference(number, least, most):
    slots, texts, runs, row_slot = written_texts(200, number, 9000)
    mine, near = (there(slots), there(texts)), (slots, texts)
    ngram(*mine, runs.cuda(), row_slot.cuda(), least, most)
    ngram_reference(*near, runs, row_slot, least, most)
    assert torch.equal(mine[0].words.cpu(), slots.words)
    assert torch.equal(mine[0].drafts.cpu(), slots.drafts)
    assert torch.equal(mine[1].cpu(), texts)
