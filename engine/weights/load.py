"""Fills a model: streams the shards, joins pieces, packs each part as soon as it is complete.

In: a model whose parts know their shapes, its WEIGHTS, and a folder (or nothing, with load_format "dummy"). Everything
is checked from the headers first: a ConfigError names every missing, every left-over and every misshapen tensor before
a byte of weights is read. Thread: the one that builds the model. Memory: the packed parts, and one part's pieces.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.weights.dummy import draw
from engine.weights.files import Shard, open_checkpoint
from engine.weights.table import Part, Place, Table, expand

if TYPE_CHECKING:
    from engine.models.base import Model

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)
READABLE = ("F32", "F16", "BF16")


def load_weights(
    model: Model,
    folder: str,
    load_format: str = "auto",
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    progress: Progress | None = None,
) -> None:
    """Fills every part of `model`. `dtype` is the activations'; `seed` is read by load_format "dummy" only."""
    table = model.weight_table()
    places = expand(table, model)
    filler = _Filler(places, dtype, device)
    if load_format == "dummy":
        _draw_all(places, filler, model.config.torch_dtype, device, seed, progress)
    elif load_format in ("auto", "safetensors"):
        shards = open_checkpoint(folder)
        names = _match(table, places, shards, folder)
        _stream(shards, names, filler, progress)
    else:
        raise ConfigError(f"load_format={load_format!r}: allowed are auto, safetensors, dummy")
    assert not filler.pending, "every part was complete in the headers"


class _Filler:
    """Collects pieces until a part has all of them."""

    def __init__(self, places: dict[str, Place], dtype: torch.dtype, device: str) -> None:
        self._places = places
        self._dtype = dtype
        self._device = device
        self.pending: dict[Part, int] = {}  # pieces that a part still waits for
        self._pieces: dict[Part, dict[str, list[Tensor | None]]] = {}
        for place in places.values():
            self.pending[place.part] = self.pending.get(place.part, 0) + 1

    def add(self, name: str, tensor: Tensor) -> None:
        place = self._places[name]
        part = place.part
        if part not in self._pieces:
            self._pieces[part] = {kind: [None] * len(shapes) for kind, shapes in part.expects().items()}
        self._pieces[part][place.kind][place.index] = tensor
        self.pending[part] -= 1
        if not self.pending[part]:
            part.fill(self._pieces.pop(part), self._dtype, self._device)
            del self.pending[part]


def _match(table: Table, places: dict[str, Place], shards: list[Shard], folder: str) -> dict[str, str]:
    """Checkpoint name -> canonical name of every tensor to read; ConfigError with all that does not fit."""
    names: dict[str, str] = {}
    present: set[str] = set()  # canonical names met in a file, fitting or not
    left_over, wrong, skipped = [], [], 0
    for shard in shards:
        for name, info in shard.tensors.items():
            canonical = table.canonical(name)
            place = places.get(canonical)
            if place is None and table.ignored(canonical):
                skipped += 1
            elif place is None:
                left_over.append(name)
            elif canonical in present:
                wrong.append(f"{name} is there twice, under different prefixes")
            elif info.shape != place.shape:
                wrong.append(f"{name} has shape {list(info.shape)}, the configuration asks for {list(place.shape)}")
            elif info.dtype not in READABLE:
                wrong.append(f"{name} has dtype {info.dtype}, readable are {', '.join(READABLE)}")
            else:
                names[name] = canonical
            present.add(canonical)
    said = _count("missing", [name for name in places if name not in present])
    said += _count("left over", left_over) + _count("not fitting", wrong)
    if said:
        raise ConfigError(f"{folder}: the weights do not fit the architecture; {'; '.join(said)}")
    if skipped:
        log.info("%s: %d tensors that serving does not read were skipped", folder, skipped)
    return names


def _count(word: str, lines: list[str]) -> list[str]:
    return [f"{len(lines)} {word}: {', '.join(lines)}"] if lines else []


def _stream(shards: list[Shard], names: dict[str, str], filler: _Filler, progress: Progress | None) -> None:
    total = sum(info.num_bytes for shard in shards for name, info in shard.tensors.items() if name in names)
    done = 0
    for shard in shards:
        with shard.open() as reader:
            for name, info in shard.tensors.items():
                if name in names:
                    filler.add(names[name], reader.tensor(name))
                    done += info.num_bytes
                    if progress is not None:
                        progress(done, total)


def _draw_all(
    places: dict[str, Place],
    filler: _Filler,
    dtype: torch.dtype,
    device: str,
    seed: int,
    progress: Progress | None,
) -> None:
    counts = {name: torch.Size(place.shape).numel() * dtype.itemsize for name, place in places.items()}
    total, done = sum(counts.values()), 0
    for name, place in places.items():
        filler.add(name, draw(name, place.shape, dtype, device, seed))
        done += counts[name]
        if progress is not None:
            progress(done, total)
