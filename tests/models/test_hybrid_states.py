"""Families with states equal transformers: single layers, and logits of mixed rows in chunks."""

import pytest
import torch

from engine.layers.norm import Normed
from engine.layers.rope import Rope
from tests import tiny, tiny_states
from tests.layers.state_rows import Sequence, in_steps
from tests.models.harness import Harness
from tests.models.seeing import load, oracle
from tests.models.test_decoders import prompt

TOLERANCE = 2e-4
ROPE = Rope(torch.empty(0), torch.empty(0))


def module_of(layer):
    """The mixer of a transformers layer."""
    return next(getattr(layer, name) for name in ("linear_attn", "mamba", "mixer") if hasattr(layer, name))


def logprobs(logits):
    return logits.float().log_softmax(-1)


@pytest.mark.parametrize("name", tiny_states.STATES)
def test_every_layer_with_a_state_is_that_of_transformers(name):
    model, theirs = load(tiny.checkpoint(name)), oracle(name)
    body = (theirs.backbone if hasattr(theirs, "backbone") else theirs.model).layers
    states = {number: layer.state for number, layer in enumerate(model.layers) if layer.state is not None}
    assert len(states) >= 2
    scale = getattr(theirs.config, "ssm_out_multiplier", 1.0)  # Falcon-H1 applies this factor after the module
    inputs = torch.randn(37, model.config.text.hidden_size, generator=torch.Generator().manual_seed(5))
    for number, state in states.items():
        with torch.inference_mode():
            want = module_of(body[number])(inputs[None])[0] * scale

            def call(rows, meta, pages, state=state):
                return state.o(state(Normed(None, rows), ROPE, meta, (pages,)))

            row = Sequence(call, *state.shape.parts(torch.float32, torch.float32), state.form.chunk, state.form.ring)
            got = row.prompt(inputs, in_steps(len(inputs), 11))
        assert (got - want).abs().max() <= 2e-5 * max(1.0, float(want.abs().max()))


@pytest.mark.parametrize("name", tiny_states.STATES)
def test_log_probabilities_of_mixed_rows_in_chunks_equal_transformers(name):
    harness = Harness(load(tiny.checkpoint(name)))
    first, second = (harness.add(prompt(length, seed=2)) for length in (40, 23))
    with torch.inference_mode():
        want = [oracle(name)(input_ids=torch.tensor([row.tokens])).logits[0] for row in (first, second)]
    got = [harness.step((first, 33)), harness.step((first, 7), (second, 10)), harness.step((second, 13))]
    wanted = [want[0][:33], torch.cat([want[0][33:], want[1][:10]]), want[1][10:]]
    for ours, theirs in zip(got, wanted, strict=True):
        assert (logprobs(ours) - logprobs(theirs)).abs().max() <= TOLERANCE
