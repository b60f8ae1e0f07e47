"""A model's own layer for multi-token prediction: its drafts are those of transformers' MtpModel."""

from __future__ import annotations

import functools
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from engine.base.errors import ConfigError
from tests import drafters, tiny
from tests.drafters import PROMPTS
from tests.engine.test_drafts import PATHS, SETTINGS, check, collected, drafts_of, on_path, requests_of
from tests.engine_kit import answer, running, text_request
from tests.once import new_folder

__all__ = ["on_path"]
TARGET = "glm4_moe"
LENGTH = 24


@functools.cache
def target() -> Any:
    return tiny.reference(tiny.checkpoint(TARGET))


@functools.cache
def text(number: int) -> tuple[int, ...]:
    """A prompt with the target's answer."""
    return tuple(drafters.greedy(target(), PROMPTS[number], LENGTH))


def hidden_of(ids: list[int]) -> torch.Tensor:
    """The target's hidden states behind its final norm, [1, n, hidden]."""
    with torch.no_grad():
        return target().get_decoder()(torch.tensor([ids])).last_hidden_state


def after(model: Any, ids: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """The layer's output [1, n, hidden] for tokens [1, n] and the hidden states before them."""
    return model.forward_layer(0, before, torch.arange(ids.shape[1])[None], None, input_ids=ids)


@functools.cache
def trained() -> Any:
    """transformers' layer, taught to follow the target's answers."""
    from transformers.modeling_layers import MtpModel

    with tiny.quiet():
        model = MtpModel(target(), 1)
    draw = torch.Generator().manual_seed(3)
    for name, parameter in model.layers.named_parameters():
        parameter.data = torch.randn(parameter.shape, generator=draw) * 0.15 + ("norm" in name)
    for name, buffer in model.layers.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.data = torch.randn(buffer.shape, generator=draw) * 0.05
    data = [(torch.tensor([text(number)]), hidden_of(list(text(number)))) for number in range(2)]
    optimizer = torch.optim.Adam(model.layers.parameters(), 0.01)
    for _ in range(40):
        loss = torch.zeros(())
        for ids, hidden in data:
            out = after(model, ids[:, 1:-1], hidden[:, :-2])
            again = after(model, ids[:, 2:-1], out[:, :-1])
            for made, wanted in ((out, ids[0, 2:]), (again, ids[0, 3:])):
                loss = loss + functional.cross_entropy(model.shared_head(made)[0], wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


@functools.cache
def checkpoint() -> Path:
    """The target's folder with the layer's tensors, by the names of GLM-4.5."""
    folder = new_folder("mtp") / TARGET
    shutil.copytree(tiny.checkpoint(TARGET), folder)
    tensors = load_file(folder / "model.safetensors")
    stem = f"model.layers.{target().config.num_hidden_layers}."
    for name, tensor in trained().layers[0].state_dict().items():
        name = name.replace("mtp_block.", "").replace("post_norm", "shared_head.norm")
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(tensor):
                gate, up = both.chunk(2)
                tensors[f"{stem}mlp.experts.{expert}.gate_proj.weight"] = gate.contiguous()
                tensors[f"{stem}mlp.experts.{expert}.up_proj.weight"] = up.contiguous()
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(tensor):
                tensors[f"{stem}mlp.experts.{expert}.down_proj.weight"] = down.contiguous()
        else:
            tensors[stem + name] = tensor
    tensors[f"{stem}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    tensors[f"{stem}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    return folder


def asked(most: int) -> dict[str, Any]:
    return {"method": "mtp", "num_speculative_tokens": most}


@torch.no_grad()
def propose(known: list[int], hidden: torch.Tensor, count: int) -> list[int]:
    """Greedy drafts of transformers' layer after a text."""
    ids, before = list(known[1:]), hidden[:, : len(known) - 1]
    for _ in range(count):
        out = after(trained(), torch.tensor([ids]), before)
        ids.append(int(trained().shared_head(out[0, -1]).argmax()))
        before = torch.cat([before, out[:, -1:]], 1)
    return ids[len(known) - 1 :]


def expected(number: int, most: int) -> tuple[int, int, int]:
    full = list(text(number))
    hidden = hidden_of(full)
    steps = drafters.steps_of(full, len(PROMPTS[number]), most, lambda known, k: propose(known, hidden, k))
    return drafters.summed(steps)


@pytest.mark.covering(1)
@pytest.mark.parametrize(("most", "settings"), [(1, {}), (3, {}), (5, {"max_prefill_chunk": 3})])
@pytest.mark.parametrize("on_path", PATHS[:2], indirect=True)
async def test_drafts_are_those_of_transformers_layer(on_path, most, settings):
    async with running(checkpoint(), speculative=asked(most), **settings) as own:
        (tokens,) = await answer(own, text_request(PROMPTS[0], LENGTH, ignore_eos=True))
        assert tokens == list(text(0)[len(PROMPTS[0]) :])
        drafts = drafts_of(own)
        wanted = expected(0, most)
        assert wanted[2] >= 5, "a layer that is never right would not show an error"
        assert (drafts.num_drafts, drafts.num_draft_tokens, drafts.num_accepted_tokens) == wanted


@pytest.mark.full
@pytest.mark.parametrize("settings", SETTINGS, ids=["plain", "chunks", "pressure", "few-rows"])
@pytest.mark.parametrize("on_path", PATHS, indirect=True)
async def test_answers_are_those_without_drafts(on_path, settings):
    requests = requests_of(1, 9)
    async with running(checkpoint(), **settings) as own:
        wanted = await collected(own, requests)
    async with running(checkpoint(), speculative=asked(2), **settings) as own:
        check(await collected(own, requests), wanted)
        assert drafts_of(own).num_drafts > 0


def without(folder: Path, *names: str) -> Path:
    shutil.copytree(checkpoint(), folder)
    tensors = {name: each for name, each in load_file(folder / "model.safetensors").items() if name not in names}
    save_file(tensors | {"model.layers.3.own": torch.zeros(2)} if not names else tensors, folder / "model.safetensors")
    return folder


async def test_a_model_without_the_layer_or_with_parts_of_it_is_refused(tmp_path):
    for folder, words in (
        (tiny.checkpoint("qwen3"), "multi-token-prediction layers of Qwen3ForCausalLM are not served"),
        (without(tmp_path / "less", "model.layers.3.eh_proj.weight"), "1 missing: layers.3.eh_proj.weight"),
        (without(tmp_path / "more"), "1 left over: model.layers.3.own"),
    ):
        with pytest.raises(ConfigError, match=re.escape(words)):
            async with running(folder, speculative=asked(2)):
                pass
