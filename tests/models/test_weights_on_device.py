"""Weights on an accelerator: the files' bits, joined in place, and loaded quickly. Needs a device."""

import json
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.base.errors import ConfigError
from engine.kernels.gemm.weight import Weight
from engine.layers.padded import PaddedGated, PaddedLinear
from engine.models.registry import build_model, load_model_config
from engine.weights import load as loading
from engine.weights import stream as streaming
from engine.weights.load import load_weights, weight_bytes
from engine.weights.table import expand
from tests import tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")]


def filled(folder, device, activations, **options):
    model = build_model(load_model_config(folder), activations, device)
    with torch.inference_mode():
        load_weights(model, str(folder), **options)
    return model


def parts_of(model):
    return list({id(place.part): place.part for place in expand(model.weight_table(), model).values()}.values())


def values_of(part):
    """The values that a part multiplies by, in the checkpoint's order, as float32 on the host."""
    packed, found = getattr(part, "weight", None), []
    if isinstance(packed, Weight):
        found = [packed.dense(), packed.dense_bias()]
    if isinstance(part, PaddedGated):
        found = [torch.cat([half[: part.out_features[0]] for half in both.chunk(2)]) for both in found]
    elif isinstance(part, PaddedLinear) and found[1] is None:
        found = [found[0][:, : part.in_features], found[0][:, part.in_features]]
    found += [getattr(part, name, None) for name in ("table", "weight", "bias")]
    return [tensor.float().cpu() for tensor in found if isinstance(tensor, torch.Tensor)]


@pytest.mark.parametrize("saved", ["float32", "bfloat16"])
@pytest.mark.parametrize("make", [tiny.llama, tiny.qwen2, tiny.qwen3, tiny.omni])
def test_the_device_holds_what_the_host_reads(make, saved, tmp_path, monkeypatch):
    folder = tiny.save(make(), tmp_path / "model", dtype=saved, max_shard_size="200KB")

    def stream(*args):
        streaming.stream(*args, chunk_bytes=4096 + 12, threads=3)

    monkeypatch.setattr(loading, "stream", stream)
    got = filled(folder, "cuda:0", torch.bfloat16)
    want = filled(folder, "cpu", torch.bfloat16)
    for ours, theirs in zip(parts_of(got), parts_of(want), strict=True):
        for mine, expected in zip(values_of(ours), values_of(theirs), strict=True):
            # The device stores a bias in the activations' dtype, the host in float32.
            assert torch.equal(mine, expected) or torch.equal(mine, expected.bfloat16().float())


def test_random_weights_are_drawn_quickly_and_once(tmp_path):
    shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8, "num_attention_heads": 32}
    shape |= {"num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False}
    base = json.loads((tiny.checkpoint("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**base, **shape, "torch_dtype": "bfloat16", "dtype": "bfloat16"}))
    filled(tiny.checkpoint("llama"), "cuda:0", torch.bfloat16, load_format="dummy")  # first calls are slow
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    begun = time.perf_counter()
    model = filled(tmp_path, "cuda:0", torch.bfloat16, load_format="dummy")
    seconds, size = time.perf_counter() - begun, weight_bytes(model)
    print(f"{size / 1e9:.1f} GB drawn in {seconds:.2f} s, {size / 1e9 / seconds:.0f} GB/s")
    assert seconds < size / 5e9
    assert torch.cuda.memory_allocated() - before < 1.01 * size
    assert torch.cuda.max_memory_allocated() - before < 1.05 * size, "joined pieces are not copied"


def test_one_value_that_is_no_number_is_found_anywhere(tmp_path):
    """A device sums every value, so a NaN is found in a tensor of any size."""
    folder = tiny.save(tiny.llama(intermediate_size=20_000), tmp_path / "model", dtype="bfloat16")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][19_999, 63] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.up_proj\.weight: the weights hold NaN or infinity"):
        filled(folder, "cuda:0", torch.bfloat16)
