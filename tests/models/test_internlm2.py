"""InternLM2 against its makers' formulas (tests/models/internlm2.py): alone, in a busy engine, and with InternViT."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import engine.run.start
from engine.models.registry import load_model_config
from tests.engine.host_accelerator import HostAccelerator
from tests.invariance.devices import Answer, Device
from tests.models import internlm2
from tests.models.harness import Harness, load
from tests.models.seeing import prepare
from tests.models.test_decoders import TOLERANCE, prompt
from tests.models.test_families import PROMPTS, TOKENS, check_busy
from tests.models.test_internvl_chat import published
from tests.quant import oracle
from tests.quant.written import AWQ, BLOCKS, awq, floats8

PREFIX = "language_model."


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return internlm2.checkpoint(tmp_path_factory.mktemp("internlm2") / "internlm2")


@pytest.fixture(scope="module")
def answers(folder):
    return [Answer(internlm2.greedy(folder, tokens, TOKENS)) for tokens in PROMPTS]


@pytest.mark.parametrize(
    "changes",
    [{}, {"bias": True}, {"num_key_value_heads": 6}, {"num_key_value_heads": 1, "rope_scaling": None}],
)
def test_logits_are_those_of_the_makers_formulas(tmp_path, changes):
    folder, tokens = internlm2.checkpoint(tmp_path / "made", **changes), prompt(40)
    want = internlm2.logits(folder, internlm2.embeddings(folder, tokens), {**internlm2.CONFIG, **changes})
    harness = Harness(load(folder))
    for chunk in (0, 7):
        assert (harness.prefill(harness.add(tokens), chunk) - want).abs().max() <= TOLERANCE


async def test_tokens_of_a_busy_engine_are_those_of_the_formulas(folder, answers):
    await check_busy(folder, Device("cpu"), answers)


async def test_so_do_tokens_of_an_accelerators_steps(folder, answers, monkeypatch):
    monkeypatch.setattr(engine.run.start, "open_accelerator", lambda _device: HostAccelerator())
    await check_busy(folder, Device("cpu"), answers)


def test_a_config_that_says_nothing_of_biases_has_them(folder, tmp_path):
    """InternLM2Config has a default bias."""
    assert not load_model_config(folder).text.qkv_bias
    config = json.loads((folder / "config.json").read_text())
    del config["bias"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = load_model_config(tmp_path).text
    assert (text.qkv_bias, text.o_bias, text.mlp_bias) == (True, True, False)


@pytest.mark.parametrize("sight", ["text", "large picture", "two pictures"])
def test_pictures_of_internvl_chat_are_read_by_it(tmp_path, sight):
    """InternVL2-8B and 2.5-8B: their vision transformer and projector are those of test_internvl_chat.py."""
    folder = published("internvl", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    inner = {**internlm2.CONFIG, "hidden_size": config["llm_config"]["hidden_size"], "num_attention_heads": 8}
    held = load_file(folder / "model.safetensors")
    held = {name: tensor for name, tensor in held.items() if not name.startswith("language_model.")}
    save_file(held | internlm2.tensors(inner, PREFIX), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, "llm_config": inner}))
    harness = Harness(load(folder))
    row = prepare("internvl", sight, harness)
    x = internlm2.embeddings(folder, row.tokens, PREFIX)
    for start, rows in row.media:
        x[start : start + len(rows)] = rows
    want = internlm2.logits(folder, x, inner, PREFIX)
    assert (harness.prefill(row, 50) - want).abs().max() <= TOLERANCE


@pytest.mark.parametrize(("settings", "writer"), [(AWQ | {"group_size": 64}, awq(64)), (BLOCKS, floats8(per="block"))])
def test_quantised_products_are_arranged_too(tmp_path, settings, writer):
    """In InternVL2-8B-AWQ, queries, keys and values are joined in one matrix of quantised weights and scales."""
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 8}
    config = {**internlm2.CONFIG, **sizes, "dtype": "float32"}
    folder = internlm2.checkpoint(tmp_path / "coded", **sizes, quantization_config=settings)
    held, draw = internlm2.tensors(config), torch.Generator().manual_seed(5)
    for name in [name for name in held if ".layers." in name and "norm" not in name]:
        module, (rows, columns) = name.removesuffix(".weight"), held.pop(name).shape
        held |= {f"{module}.{kind}": tensor.contiguous() for kind, tensor in writer(draw, rows, columns).items()}
    save_file(held, folder / "model.safetensors")
    plain = internlm2.checkpoint(tmp_path / "plain", **sizes)
    found = {name: torch.from_numpy(value).float().contiguous() for name, value in oracle.dequantised(folder).items()}
    save_file(found, plain / "model.safetensors")
    tokens = prompt(20)
    want = internlm2.logits(plain, internlm2.embeddings(plain, tokens), config)
    harness = Harness(load(folder))
    assert (harness.prefill(harness.add(tokens)) - want).abs().max() <= 1e-3 * want.abs().max()
