"""Adapters for tests: random matrices for the layers of a tiny checkpoint, and models with them merged in."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine import Request
from engine.base.config import LoraConfig
from engine.layers.linear import Linear
from engine.layers.moe import Experts
from engine.lora.adapter import Adapter, PackedExperts, PackedSite
from engine.lora.sites import changed
from engine.lora.targets import ExpertsTarget, LinearTarget, targets_of
from engine.models.registry import build_model, load_model_config
from engine.weights.table import Table, addressed

EMBEDDINGS = ("embed_tokens.weight", "embeddings.weight")


class Drawn(NamedTuple):
    """A random adapter: packed, and as differences of matrices."""

    adapter: Adapter
    deltas: dict[str, Tensor]  # by canonical name of a tensor of the checkpoint
    experts: dict[str, Tensor]  # by path: [experts, rows of all pieces, in]
    targets: dict[str, ExpertsTarget]  # of the same paths
    table: Table


def drawn(
    folder: Path, rank: int, seed: int, only: Collection[str] = (), scale: float = 0.1, with_experts: bool = True
) -> Drawn:
    """An adapter of every layer that may have one, or of the modules whose names end in a word of `only`."""
    model = build_model(load_model_config(folder), torch.float32)
    places = {path for path, _ in changed(model, LoraConfig())}
    targets, draw = targets_of(model).by_path, torch.Generator().manual_seed(seed)
    sites: dict[str, PackedSite | PackedExperts] = {}
    deltas, experts, found = {}, {}, {}

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw) * scale

    for path, names, part in addressed(model.weight_table(), model):
        if path not in places:
            continue
        if isinstance(part, Experts):
            if not with_experts or (only and "experts" not in only):
                continue
            a = normal(part.num_experts, len(part.pieces) * rank, part.in_features)
            b = tuple(normal(part.num_experts, rows, rank) for rows in part.pieces)
            sites[path] = PackedExperts(a, b)
            experts[path] = torch.cat([up @ down for up, down in zip(b, a.split(rank, 1))], 1)
            found[path] = targets[path]
            continue
        assert isinstance(part, Linear)
        downs, ups = [], []
        for piece, (name, rows) in enumerate(zip(names, part.out_features)):
            down, up = normal(rank, part.in_features), normal(rows, rank)
            if only and name.rpartition(".")[2] not in only:
                down, up = torch.zeros_like(down), torch.zeros_like(up)
            else:
                deltas[f"{name}.weight"] = up @ down
            downs.append(down)
            target = targets[path]
            assert isinstance(target, LinearTarget)
            ups.append(target.arranged(piece, up).contiguous())
        if any(up.any() for up in ups):
            sites[path] = PackedSite(torch.cat(downs), tuple(ups))
    sha256 = hashlib.sha256(f"{folder.name} {rank} {seed} {only}".encode()).digest()
    in_towers = any(not path.startswith("layers.") and path != "head" for path in sites)
    adapter = Adapter(f"drawn-{seed}", sha256, rank, sites, sum(site.nbytes for site in sites.values()), in_towers)
    return Drawn(adapter, deltas, experts, found, model.weight_table())


def merged(folder: Path, drawn: Drawn, into: Path) -> Path:
    """A copy of the checkpoint whose linear layers contain the adapter's differences."""
    shutil.copytree(folder, into)
    left = dict(drawn.deltas)
    for file in sorted(into.glob("*.safetensors")):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            delta = left.pop(drawn.table.canonical(name), None)
            if delta is not None:
                tensors[name] = (tensor.float() + delta.view(tensor.shape)).to(tensor.dtype)
        save_file(tensors, file, {"format": "pt"})
    if "lm_head.weight" in left:  # tied to the embedding
        embedding = next(tensor for name, tensor in tensors.items() if name.endswith(EMBEDDINGS))
        tensors["lm_head.weight"] = (embedding.float() + left.pop("lm_head.weight")).to(embedding.dtype)
        save_file(tensors, file, {"format": "pt"})
        config = json.loads((into / "config.json").read_text())
        for each in (config, config.get("text_config", {})):
            each["tie_word_embeddings"] = False
        (into / "config.json").write_text(json.dumps(config))
    assert not left, f"not in the checkpoint: {list(left)}"
    return into


@torch.inference_mode()
def merge(model: Any, drawn: Drawn) -> None:
    """Adds the adapter's differences to the parameters of transformers' model, experts included."""
    parameters = {drawn.table.canonical(name): each for name, each in model.named_parameters()}
    for name, delta in drawn.deltas.items():
        parameters[name] += delta
    for path, delta in drawn.experts.items():
        target, layer = drawn.targets[path], ".".join(path.split(".")[:2])
        (name,) = (each for each in parameters if each.startswith(f"{layer}.") and each.endswith(f".{target.kind}"))
        if target.interleaved:
            delta = torch.stack(delta.chunk(2, 1), 2).flatten(1, 2)
        is_turned = parameters[name].shape != delta.shape
        parameters[name] += delta.transpose(1, 2) if is_turned else delta


def adapted(request: Request, drawn: Drawn | None) -> Request:
    """The request with the adapter."""
    return replace(request, lora=None if drawn is None else drawn.adapter)
