"""Recurrent layers equal transformers' modules in float32: at once, in chunks, token by token, with drafts."""

from __future__ import annotations

import pytest
import torch
from transformers import FalconMambaConfig, Mamba2Config, MambaConfig, Qwen3NextConfig
from transformers.models.falcon_mamba.modeling_falcon_mamba import FalconMambaMixer
from transformers.models.mamba.modeling_mamba import MambaMixer
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from engine.kernels.gemm.pack import Placement
from engine.kernels.state.delta import DeltaShape
from engine.kernels.state.selective import SelectiveShape
from engine.kernels.state.ssd import SsdShape
from engine.layers.delta import GatedDelta
from engine.layers.mamba import Mamba1, Mamba2
from engine.layers.norm import Normed
from engine.layers.state import StateForm, state_form
from tests.layers.state_rows import Sequence, in_steps

HIDDEN, LENGTH, LIMIT = 32, 83, 2e-4
PLACEMENT = Placement(torch.float32, "cpu")
FORMS = {"cpu": state_form("cpu", 7), "accelerator": StateForm(16, 32)}
DELTA = {
    "hidden_size": HIDDEN, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention"],
    "num_hidden_layers": 1, "hidden_act": "silu", "rms_norm_eps": 1e-6,
}  # fmt: skip


def filled(module, layer, names):
    """Fills a layer from the oracle; `names`: part of the layer -> oracle's modules, "" is the oracle itself."""
    tensors = dict(module.state_dict())
    for part, modules in names.items():
        target = getattr(layer, part)
        wanted = {
            kind: [tensors.pop(f"{each}.{kind}" if each else kind) for each in modules] for kind in target.expects()
        }
        target.fill(wanted, PLACEMENT)
    assert not tensors, list(tensors)
    return layer


def delta_layer(form, grouped):
    shape = DeltaShape(2, 4, 8, 16, 4, form.ring)
    if grouped:
        module = Qwen3NextGatedDeltaNet(Qwen3NextConfig(**DELTA), 0)
        names = ("in_proj_qkvz", "in_proj_ba")
    else:
        module = Qwen3_5GatedDeltaNet(Qwen3_5TextConfig(**DELTA), 0)
        names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    layer = GatedDelta(HIDDEN, shape, form, torch.float32, grouped)
    parts = {"product": names, "conv": ("conv1d",), "numbers": ("",), "norm": ("norm",), "o": ("out_proj",)}
    return module, parts, layer


def mamba2_layer(form):
    config = Mamba2Config(
        hidden_size=HIDDEN, num_heads=8, head_dim=8, n_groups=2, state_size=16, conv_kernel=4, expand=2, use_bias=True,
        num_hidden_layers=1, time_step_rank=4, chunk_size=64,
    )  # fmt: skip
    layer = Mamba2(HIDDEN, SsdShape(8, 8, 2, 16, 4, form.ring), form, torch.float32, bias=True, conv_bias=True)
    parts = {"product": ("in_proj",), "conv": ("conv1d",), "numbers": ("",), "norm": ("norm",), "o": ("out_proj",)}
    return Mamba2Mixer(config, 0), parts, layer


def mamba1_layer(form, plain):
    kind, mixer = (FalconMambaConfig, FalconMambaMixer) if plain else (MambaConfig, MambaMixer)
    config = kind(hidden_size=HIDDEN, state_size=8, conv_kernel=4, time_step_rank=4, num_hidden_layers=1)
    shape = SelectiveShape(config.intermediate_size, 8, 4, form.ring)
    norms = {"plain": config.mixer_rms_eps} if plain else {}
    layer = Mamba1(HIDDEN, shape, 4, form, torch.float32, bias=False, conv_bias=True, **norms)
    parts = {
        "product": ("in_proj",), "conv": ("conv1d",), "mixed": ("x_proj",), "steps": ("dt_proj",), "numbers": ("",),
        "o": ("out_proj",),
    }  # fmt: skip
    return mixer(config, 0, initialize_mixer_weights=False), parts, layer


LAYERS = {
    "Qwen3.5": lambda form: delta_layer(form, grouped=False),
    "Qwen3-Next": lambda form: delta_layer(form, grouped=True),
    "Mamba-2": mamba2_layer,
    "Mamba": lambda form: mamba1_layer(form, plain=False),
    "FalconMamba": lambda form: mamba1_layer(form, plain=True),
}


@pytest.fixture(params=list(LAYERS), scope="module")
def compared(request):
    """Filled layers by form, the inputs, and the oracle's outputs."""
    torch.manual_seed(0)
    module, parts, _ = LAYERS[request.param](FORMS["cpu"])
    with torch.no_grad():
        for name, weight in module.named_parameters():
            known = name == "A_log" or name.endswith("norm.weight")
            weight.copy_(torch.rand_like(weight) + 0.5 if known else torch.randn_like(weight) * 0.3)
        x = torch.randn(LENGTH, HIDDEN)
        want = module(x[None])[0]
    layers = {name: filled(module, LAYERS[request.param](form)[2], parts) for name, form in FORMS.items()}
    return layers, x, want


def sequence(layer):
    parts, tail = layer.shape.parts(torch.float32, torch.float32)

    def call(x, meta, pages):
        return layer.o(layer(Normed(None, x), None, meta, (pages,)))

    return Sequence(call, parts, tail, layer.form.chunk, layer.form.ring)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [LENGTH, 1, 7, 64])
def test_outputs_are_the_oracles(compared, form, size):
    layers, x, want = compared
    got = sequence(layers[form]).prompt(x, in_steps(LENGTH, size))
    assert (got - want).abs().max() < LIMIT


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("drafts", [1, pytest.param(3, marks=pytest.mark.full), 7])
def test_drafts_leave_nothing_behind(compared, form, drafts):
    layers, x, want = compared
    got = sequence(layers[form]).drafted(x, drafts, torch.Generator().manual_seed(drafts))
    assert (got - want).abs().max() < LIMIT


def test_on_a_cpu_cuts_move_no_bit(compared):
    layers, x, _ = compared
    whole = sequence(layers["cpu"]).prompt(x, [LENGTH])
    assert all(torch.equal(sequence(layers["cpu"]).prompt(x, in_steps(LENGTH, size)), whole) for size in (1, 7, 64))
