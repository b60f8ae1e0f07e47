"""Adapters of quantised bases: the answers of a float checkpoint with the same matrices and the adapter merged in."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from engine.base.config import LoraConfig
from engine.engine import Engine
from engine.layers.linear import Linear
from engine.weights.table import addressed
from tests import tiny
from tests.engine_kit import answer_deltas, prompts, running, text_request
from tests.lora_kit import Drawn, adapted, drawn, merged
from tests.models.harness import load
from tests.quant.experts import gpt_oss_folders
from tests.quant.written import VARIANTS, write

# Forms of a CPU: FP8 in blocks, 4 bits in groups, some matrices in floats, columns in another order, tables of values.
FORMS = ("fp8 blocks", "ct w4 32", "ct w4 mixed", "gptq act", "bnb nf4")
PROMPTS = prompts(4, tiny.FIRST_SPECIAL, seed=2, longest=30)


def in_floats(folder: Path, into: Path) -> Path:
    """The checkpoint with its quantised matrices as floats."""
    model, into = load(folder), into / "floats"
    into.mkdir()
    tensors = {name: each for name, each in load_file(folder / "model.safetensors").items() if "norm" in name}
    tensors |= {"model.embed_tokens.weight": model.embed.table.float()}
    for _, names, part in addressed(model.weight_table(), model):
        if isinstance(part, Linear):
            for name, rows in zip(names, part.weight.dense().float().split(part.out_features)):
                tensors[f"{name if name == 'lm_head' else f'model.{name}'}.weight"] = rows.contiguous()
    save_file(tensors, into / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    (into / "config.json").write_text(json.dumps(config))
    return into


async def answers(engine: Engine, of: Drawn | None) -> list[tuple[list[int], list[float]]]:
    async def one(prompt: np.ndarray) -> tuple[list[int], list[float]]:
        asked = adapted(text_request(prompt, 6, ignore_eos=True, logprobs=0), of)
        (deltas,) = await answer_deltas(engine, asked)
        logprobs = [each.logprob for delta in deltas for each in delta.logprobs]
        return [token for delta in deltas for token in delta.token_ids], logprobs

    return list(await asyncio.gather(*(one(prompt) for prompt in PROMPTS)))


@pytest.mark.parametrize("form", FORMS)
async def test_the_delta_is_added_to_the_product_of_codes(form, tmp_path):
    folder = write(tmp_path / "codes", VARIANTS[form])
    floats = in_floats(folder, tmp_path)
    made = drawn(floats, 4, 1)
    want = []
    for each in (floats, merged(floats, made, tmp_path / "merged")):
        async with running(each, dtype="float32") as engine:
            want.append(await answers(engine, None))
    async with running(folder, dtype="float32", lora=LoraConfig()) as engine:
        for of, expected in zip((None, made, None), (want[0], want[1], want[0])):
            for (tokens, logprobs), (other, others) in zip(await answers(engine, of), expected):
                assert tokens == other
                np.testing.assert_allclose(logprobs, others, atol=2e-3)
    assert want[0] != want[1]


async def test_adapters_of_experts_are_added_to_the_products_of_mxfp4(backend, tmp_path):
    """As with the same experts in floats, which tests/engine/lora/test_adapted_experts compares with transformers."""
    codes, floats = gpt_oss_folders(tmp_path)
    made, found = drawn(floats, 4, 1, scale=0.15), []
    for folder in (codes, floats):
        async with running(folder, dtype="float32", lora=LoraConfig()) as engine:
            found.append([await answers(engine, each) for each in (None, made)])
    for got, want in zip(*found, strict=True):
        for (tokens, logprobs), (others, values) in zip(got, want, strict=True):
            assert tokens == others
            np.testing.assert_allclose(logprobs, values, atol=1e-3)
    assert found[0][0] != found[0][1]
