"""Qwen3-Next, 3.5 and 3.6: the drafts of the `mtp` layer over recurrent layers are those of transformers' MtpModel."""

from __future__ import annotations

import functools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from engine.base.config import StateConfig
from engine.base.errors import ConfigError
from tests import drafters, tiny
from tests.engine.test_drafts import FEW_PATHS, PATHS, check_twice, collected, drafts_of, on_path, requests_of
from tests.engine_kit import answer, running, text_request
from tests.once import new_folder
from tests.tiny_states import AXES, DELTA, EXPERTS, FULL, LINEAR, MIXED

__all__ = ["on_path"]
LENGTH = 24
LAYERS = {**MIXED, **DELTA, "layer_types": [LINEAR, LINEAR, FULL]}
TARGETS: dict[str, Any] = {
    "qwen3_5": tiny.causal("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", **LAYERS, rope_parameters=AXES),
    "qwen3_5_moe": tiny.causal(
        "Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", **LAYERS, **EXPERTS, rope_parameters=AXES
    ),
    "qwen3_next": tiny.causal("Qwen3NextForCausalLM", "Qwen3NextConfig", **LAYERS, **EXPERTS),
}
NAMES = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "post_norm": "norm"}
PROMPT = torch.randint(2, tiny.VOCAB_SIZE, (37,), generator=torch.Generator().manual_seed(1)).tolist()
ROOM = {"num_gpu_blocks_override": 3000}


class Layer:
    """transformers' layer over one target, taught to follow the target's answer to the prompt."""

    def __init__(self, name: str) -> None:
        from transformers.modeling_layers import MtpModel

        self.target = TARGETS[name]()
        config = self.target.config
        config.num_mtp_layers, config.mtp_layer_types = 1, [FULL]
        with tiny.quiet():
            self.model = MtpModel(self.target, 1)
        self.text = drafters.greedy(self.target, PROMPT, LENGTH)
        self.hidden = self.hidden_of(self.text)
        self.teach()

    def hidden_of(self, ids: list[int]) -> Tensor:
        """The target's hidden states behind its final norm, [1, n, hidden]."""
        with torch.no_grad():
            return self.target.get_decoder()(torch.tensor([ids])).last_hidden_state

    def after(self, ids: Tensor, before: Tensor) -> Tensor:
        """The layer's output [1, n, hidden] for tokens [1, n] and the hidden states before them."""
        return self.model.forward_layer(0, before, torch.arange(ids.shape[1])[None], None, input_ids=ids)

    def teach(self) -> None:
        draw = torch.Generator().manual_seed(3)
        for name, parameter in self.model.layers.named_parameters():
            parameter.data = torch.randn(parameter.shape, generator=draw) * (0.05 if "norm" in name else 0.15)
        optimizer = torch.optim.Adam(self.model.layers.parameters(), 0.01)
        ids = torch.tensor([self.text])
        for _ in range(25):
            out = self.after(ids[:, 1:-1], self.hidden[:, :-2])
            again = self.after(ids[:, 2:-1], out[:, :-1])
            loss = functional.cross_entropy(self.model.shared_head(out)[0], ids[0, 2:])
            loss = loss + functional.cross_entropy(self.model.shared_head(again)[0], ids[0, 3:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    @torch.no_grad()
    def propose(self, known: list[int], count: int) -> list[int]:
        """Greedy drafts after a text."""
        ids, before = list(known[1:]), self.hidden[:, : len(known) - 1]
        for _ in range(count):
            out = self.after(torch.tensor([ids]), before)
            ids.append(int(self.model.shared_head(out[0, -1]).argmax()))
            before = torch.cat([before, out[:, -1:]], 1)
        return ids[len(known) - 1 :]

    def expected(self, most: int) -> tuple[int, int, int]:
        """Steps with drafts, drafts and right drafts of the answer to the prompt."""
        return drafters.summed(drafters.steps_of(self.text, len(PROMPT), most, self.propose))


@functools.cache
def layer(name: str) -> Layer:
    return Layer(name)


@functools.cache
def checkpoint(name: str) -> Path:
    """The target's folder with the layer's tensors, with experts one by one where the target's are."""
    folder = new_folder("mtp") / name
    tiny.save(TARGETS[name](), folder)
    tensors = load_file(folder / "model.safetensors")
    for key, tensor in layer(name).model.layers[0].state_dict().items():
        own, _, rest = key.partition(".")
        tensors["mtp." + (f"layers.0.{rest}" if own == "mtp_block" else f"{NAMES[own]}.{rest}")] = tensor
    if any(".experts.0." in key for key in tensors):
        gate_up, down = (tensors.pop(f"mtp.layers.0.mlp.experts.{kind}") for kind in ("gate_up_proj", "down_proj"))
        for number, (both, last) in enumerate(zip(gate_up, down, strict=True)):
            for kind, tensor in zip(("gate_proj", "up_proj", "down_proj"), (*both.chunk(2), last)):
                tensors[f"mtp.layers.0.mlp.experts.{number}.{kind}.weight"] = tensor.contiguous()
    save_file(tensors, folder / "model.safetensors")
    return folder


def asked(most: int) -> dict[str, Any]:
    return {"method": "mtp", "num_speculative_tokens": most}


def counts(own: Any) -> tuple[int, int, int]:
    drafts = drafts_of(own)
    return drafts.num_drafts, drafts.num_draft_tokens, drafts.num_accepted_tokens


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("name", "most", "settings"),
    [
        ("qwen3_5", 3, {"states": StateConfig(mode="all", every=16), "max_prefill_chunk": 7}),
        ("qwen3_next", 2, {}),
        pytest.param("qwen3_5_moe", 1, {}, marks=pytest.mark.full),
        pytest.param("qwen3_5", 7, {"max_prefill_chunk": 1}, marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("on_path", PATHS[:2], indirect=True)
async def test_drafts_are_those_of_transformers_layer_behind_a_hit_too(on_path, name, most, settings):
    async with running(checkpoint(name), speculative=asked(most), **ROOM, **settings) as own:
        wanted, before = layer(name).expected(most), (0, 0, 0)
        assert wanted[2] >= 5, "a layer that is never right would not show an error"
        for turn in range(2):
            (tokens,) = await answer(own, text_request(PROMPT, LENGTH, ignore_eos=True))
            assert tokens == layer(name).text[len(PROMPT) :]
            assert own.stats.prefix_hits == turn * 32
            now = counts(own)
            assert tuple(a - b for a, b in zip(now, before)) == wanted, turn
            before = now


@pytest.mark.covering(1)
@pytest.mark.parametrize("settings", [{}, {"max_prefill_chunk": 7, "max_num_batched_tokens": 48, "max_num_seqs": 4}])
@pytest.mark.parametrize("on_path", FEW_PATHS, indirect=True)
async def test_answers_are_those_without_drafts(on_path, settings):
    requests = requests_of(1, 8, 24)
    async with running(checkpoint("qwen3_5"), **ROOM, **settings) as own:
        wanted = await collected(own, requests)
    async with running(checkpoint("qwen3_5"), speculative=asked(2), debug_poison=True, **ROOM, **settings) as own:
        await check_twice(own, requests, wanted)
        assert own.stats.prefix_hits > 0
        assert drafts_of(own).num_accepted_tokens > 0


def coded(folder: Path, source: Path) -> Path:
    """FP8 in blocks of 128 x 128 in the projections of layers, the further layer's too; `folder`/floats has the same
    numbers in float32."""
    codes, floats = {}, {}
    for key, tensor in load_file(source / "model.safetensors").items():
        codes[key] = floats[key] = tensor
        if key.endswith("_proj.weight") and "linear_attn" not in key:
            scale = tensor.abs().max() / 448
            codes[key] = (tensor / scale).to(torch.float8_e4m3fn)
            floats[key] = codes[key].float() * scale
            codes[f"{key}_scale_inv"] = scale.expand(-(-len(tensor) // 128), -(-tensor.shape[1] // 128))
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    for name, tensors, config in (("codes", codes, {"quantization_config": settings}), ("floats", floats, {})):
        shutil.copytree(source, folder / name)
        save_file({key: each.contiguous() for key, each in tensors.items()}, folder / name / "model.safetensors")
        read = json.loads((folder / name / "config.json").read_text())
        (folder / name / "config.json").write_text(json.dumps(read | config))
    return folder


@pytest.mark.parametrize("name", ["qwen3_5", pytest.param("qwen3_next", marks=pytest.mark.full)])
async def test_a_quantised_layer_drafts_what_its_numbers_do(name, tmp_path):
    found = []
    for folder in (each := coded(tmp_path, checkpoint(name))) / "floats", each / "codes":
        async with running(folder, speculative=asked(2)) as own:
            tokens = await answer(own, text_request(PROMPT, LENGTH, ignore_eos=True))
            found.append((tokens, counts(own)))
    assert found[0] == found[1]
    assert found[0][1][2] > 2


def changed(folder: Path, left_out: tuple[str, ...] = (), further: tuple[str, ...] = (), **config: Any) -> Path:
    shutil.copytree(checkpoint("qwen3_5"), folder)
    tensors = {name: each for name, each in load_file(folder / "model.safetensors").items() if name not in left_out}
    save_file(tensors | {name: torch.zeros(2) for name in further}, folder / "model.safetensors")
    read = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(read | config))
    return folder


async def test_a_layer_that_is_not_whole_is_refused_by_name(tmp_path):
    for folder, words in (
        (changed(tmp_path / "less", ("mtp.fc.weight",)), "1 missing: mtp.fc.weight"),
        (changed(tmp_path / "more", (), ("mtp.own",)), "1 left over: mtp.own"),
        (changed(tmp_path / "none", mtp_num_hidden_layers=0), "names no layer for multi-token prediction"),
        (changed(tmp_path / "two", mtp_num_hidden_layers=2), "names 2 layers for multi-token prediction, and one is"),
        (changed(tmp_path / "own", mtp_use_dedicated_embeddings=True), "mtp_use_dedicated_embeddings=true: a layer"),
    ):
        with pytest.raises(ConfigError, match=re.escape(words)):
            async with running(folder, speculative=asked(2)):
                pass
    async with running(checkpoint("qwen3_5")) as own:  # the layer is not read without drafts
        assert len((await answer(own, text_request(np.arange(5, 9), 3, ignore_eos=True)))[0]) == 3
