"""Files of experts in the layouts of other releases: a pair of matrices per expert, and PEFT's exchanged parameters."""

import re

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.lora.load import load_adapter
from engine.lora.source import Source
from engine.weights.files import ADAPTER
from tests import tiny
from tests.engine.lora.test_deltas import delta, rules_of
from tests.models.harness import load
from tests.tiny_adapters import ATTENTION, EXPERTS, adapted

RANK = 3
STACKED = re.compile(r"(.*layers\.\d+)\.mlp\.experts\.(base_layer\.)?lora_A\.weight")
ALONE = {  # the block, and the matrices of an expert: gate, up, down
    "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
    "minimax_m2": ("block_sparse_moe", "w1", "w3", "w2"),
}


def pair(found: dict[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
    """Takes the parameter's matrices: A [experts, RANK, in] and B [experts, rows, RANK]."""
    a, b = (found.pop(name.replace("lora_A", half)) for half in ("lora_A", "lora_B"))
    return a.unflatten(0, (-1, RANK)), b.unflatten(1, (RANK, -1)).permute(2, 0, 1)


def of_each_expert(found: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    """Parameters of all experts as matrices of each expert."""
    block, gate, up, down = ALONE[name]
    for each in [name for name in found if STACKED.fullmatch(name)]:
        layer, is_first = STACKED.fullmatch(each).groups()
        for expert, (a, b) in enumerate(zip(*pair(found, each))):
            halves = zip((gate, up), b.chunk(2)) if is_first else [(down, b)]
            for word, rows in halves:
                module = f"{layer}.{block}.experts.{expert}.{word}"
                found |= {f"{module}.lora_A.weight": a.contiguous(), f"{module}.lora_B.weight": rows.contiguous()}
    return {name: tensor.clone() for name, tensor in found.items()}


def exchanged(found: dict[str, Tensor], _: str) -> dict[str, Tensor]:
    """As PEFT before 0.19 made them for parameters [experts, rows, in]: the matrices of the transposed difference."""
    for each in [name for name in found if STACKED.fullmatch(name)]:
        a, b = pair(found, each)
        found[each] = b.transpose(1, 2).flatten(0, 1).contiguous()
        found[each.replace("lora_A", "lora_B")] = a.permute(2, 1, 0).flatten(1, 2).contiguous()
    return found


@pytest.mark.parametrize(
    ("name", "change"),
    [*((name, of_each_expert) for name in ALONE), ("qwen3_moe", exchanged)],
    ids=["qwen3_moe", "mixtral", "minimax_m2", "exchanged"],
)
def test_experts_of_other_releases_are_the_same_adapter(name, change, tmp_path):
    adapted(name, tmp_path, r=RANK, target_modules=ATTENTION, target_parameters=EXPERTS)
    rules = rules_of(load(tiny.checkpoint(name)), tiny.checkpoint(name))
    want = load_adapter(Source(str(tmp_path)), "x", rules)
    before = load_file(tmp_path / ADAPTER)
    after = change(dict(before), name)
    assert after.keys() != before.keys() or any(after[key].shape != before[key].shape for key in after)
    save_file(after, tmp_path / ADAPTER)
    got = load_adapter(Source(str(tmp_path)), "x", rules)
    assert got.sites.keys() == want.sites.keys()
    for path, site in want.sites.items():
        assert (delta(got.sites[path]) - delta(site)).abs().max() < 1e-4, path
        assert delta(site).abs().max() > 1e-2, path
