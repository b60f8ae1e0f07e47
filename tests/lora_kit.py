"""Adapters for tests: random matrices for the layers of a tiny checkpoint, and the checkpoint with them merged in."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine import Request
from engine.base.config import LoraConfig
from engine.layers.linear import Linear
from engine.lora.adapter import Adapter, PackedSite
from engine.lora.sites import changed
from engine.models.registry import build_model, load_model_config
from engine.weights.table import Table, addressed


class Drawn(NamedTuple):
    """A random adapter: packed, and as differences of the checkpoint's matrices by canonical name."""

    adapter: Adapter
    deltas: dict[str, Tensor]
    table: Table


def drawn(folder: Path, rank: int, seed: int, only: Collection[str] = (), scale: float = 0.1) -> Drawn:
    """An adapter of every layer that may have one, or of the modules whose names end in a word of `only`."""
    config = load_model_config(folder)
    model = build_model(config, torch.float32)
    places = dict(changed(model, LoraConfig()))
    draw = torch.Generator().manual_seed(seed)
    sites, deltas = {}, {}
    for path, names, part in addressed(model.weight_table(), model):
        if path not in places:
            continue
        assert isinstance(part, Linear)
        downs, ups = [], []
        for piece, (name, rows) in enumerate(zip(names, part.out_features)):
            a = torch.randn(rank, part.in_features, generator=draw) * scale
            b = torch.randn(rows, rank, generator=draw) * scale
            if only and name.rpartition(".")[2] not in only:
                a, b = torch.zeros_like(a), torch.zeros_like(b)
            deltas[f"{name}.weight"] = b @ a
            downs.append(a)
            ups.append(b if part.arrange is None else part.arrange(piece, b).contiguous())
        if any(up.any() for up in ups):
            sites[path] = PackedSite(torch.cat(downs), tuple(ups))
    sha256 = hashlib.sha256(f"{folder.name} {rank} {seed} {only}".encode()).digest()
    nbytes = sum(site.nbytes for site in sites.values())
    adapter = Adapter(f"drawn-{seed}", sha256, rank, dict(sites), nbytes)
    return Drawn(adapter, deltas, model.weight_table())


def merged(folder: Path, drawn: Drawn, into: Path) -> Path:
    """A copy of the checkpoint whose matrices contain the adapter's differences."""
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
        embedding = next(tensor for name, tensor in tensors.items() if name.endswith("embed_tokens.weight"))
        tensors["lm_head.weight"] = (embedding.float() + left.pop("lm_head.weight")).to(embedding.dtype)
        save_file(tensors, file, {"format": "pt"})
        config = json.loads((into / "config.json").read_text())
        (into / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    assert not left, f"not in the checkpoint: {list(left)}"
    return into


def adapted(request: Request, drawn: Drawn | None) -> Request:
    """The request with the adapter."""
    return replace(request, lora=None if drawn is None else drawn.adapter)
