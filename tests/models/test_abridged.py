"""An abridged model, which runs only layers that differ, calls every operation that the whole model calls."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests import tiny
from tests.models.harness import Harness, load


class Ops(TorchDispatchMode):
    """Records each call: the operation, and dtypes, shapes and strides of its tensors."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, call, types, args=(), kwargs=None):
        leaves, _ = torch.utils._pytree.tree_flatten((args, kwargs))
        facts = [(leaf.dtype, leaf.shape, leaf.stride()) for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self.seen.append((str(call), *facts))
        return call(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    made = tiny.qwen2(num_hidden_layers=8, use_sliding_window=True, max_window_layers=3)  # three full layers
    return load(tiny.save(made, tmp_path_factory.mktemp("eight")))


def ops(harness, asked):
    with Ops() as mode:
        harness.hidden((harness.add([2, 3, 4, 5, 6]), 5), asked=asked)
    return mode.seen


@pytest.mark.parametrize("asked", [None, [4]])
def test_an_abridged_model_calls_all_that_the_whole_one_calls(model, asked):
    harness = Harness(model)
    whole = ops(harness, asked)
    with model.abridged():
        assert model.numbers == [0, 2, 6, 7]
        short = ops(harness, asked)
    assert set(short) == set(whole)
    assert len(short) < len(whole)


def test_it_is_whole_again_afterwards(model):
    numbers = model.numbers
    with pytest.raises(ZeroDivisionError), model.abridged():
        print(1 / (model.numbers is numbers))
    assert model.numbers is numbers


@pytest.mark.parametrize("count", [1, 2])
def test_a_short_model_stays_as_it_is(tmp_path, count):
    model = load(tiny.save(tiny.llama(num_hidden_layers=count), tmp_path / "short"))
    with model.abridged():
        assert model.numbers == list(range(count))
