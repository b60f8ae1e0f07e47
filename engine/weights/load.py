"""Fills a model: reads the shards, joins pieces, packs each part as soon as it is complete.

In: a model whose parts know their shapes, its WEIGHTS, and a folder (none with load_format "dummy"). The headers are
checked first: a ConfigError names all missing, left-over and misshapen tensors before any weight is read. Thread: the
thread that builds the model. Memory: the packed parts, and one part's pieces. On a CPU the files are mapped; for an
accelerator they are streamed (stream.py). Random weights are drawn on the device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from engine.base.errors import ConfigError
from engine.kernels.gemm.pack import Placement
from engine.weights.dummy import draw
from engine.weights.files import DTYPES, Shard, open_checkpoint
from engine.weights.finite import FiniteSums
from engine.weights.names import compact, is_cache_scale
from engine.weights.pieces import Pieces
from engine.weights.stream import stream
from engine.weights.table import Place, Weighted, expand
from engine.weights.upload import upload_for

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)


def load_weights(
    model: Weighted,
    folder: str,
    load_format: str = "auto",
    placement: Placement | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    pieces_of: Callable[..., Pieces] = Pieces,
) -> None:
    """Fills every part of `model`; `placement`: dtype and device, by default the model's; `seed`: for "dummy".

    `pieces_of`: makes the object that gets every tensor once; by default it fills the model's own parts.
    """
    placement = placement or Placement(model.dtype, model.device)
    table = model.weight_table()
    places = expand(table, model)
    upload, sums = upload_for(placement.device), FiniteSums()
    if load_format == "dummy":
        saved = {name: place.wanted.saved_as(model.config.torch_dtype) for name, place in places.items()}
        pieces = pieces_of(places, saved, placement)
        _draw_all(places, pieces, saved, seed, _counted(progress, _num_bytes(places, saved)))
    elif load_format in ("auto", "safetensors"):
        shards = open_checkpoint(folder)
        names = match(model, shards, folder)
        tensors = {name: info for shard in shards for name, info in shard.tensors.items() if name in names}
        saved = {names[name]: DTYPES[info.dtype] for name, info in tensors.items()}
        pieces = pieces_of(places, saved, placement, sums)
        report = _counted(progress, sum(info.num_bytes for info in tensors.values()))
        if upload is None or any(shard.gguf for shard in shards):  # GGUF readers widen codes and reorder rows
            _map(shards, names, pieces, report)
        else:
            stream(shards, names, pieces, upload, report)
    else:
        raise ConfigError(f"--load-format {load_format}: allowed are auto, safetensors, dummy")
    if upload is not None:
        upload.finish()
    if placement.device == "cpu":
        pieces.heap.trim()
    sums.check(folder)
    assert not pieces.pending, "every part was complete in the headers"


def weight_bytes(model: Weighted) -> int:
    """The bytes that the weights will take on an accelerator."""
    return sum(place.wanted.num_bytes(model.dtype) for place in expand(model.weight_table(), model).values())


def _num_bytes(places: dict[str, Place], saved: dict[str, torch.dtype]) -> int:
    return sum(torch.Size(place.wanted.shape).numel() * saved[name].itemsize for name, place in places.items())


def _counted(progress: Progress | None, total: int) -> Callable[[int], None]:
    """A function that adds up bytes and reports the sum to `progress`."""
    done = 0

    def report(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    return report


def match(model: Weighted, shards: list[Shard], folder: str) -> dict[str, str]:
    """Checkpoint name -> canonical name, for every tensor to read; ConfigError with all mismatches."""
    table = model.weight_table()
    places = expand(table, model)
    names: dict[str, str] = {}
    present: set[str] = set()  # all canonical names in the files
    built = {name.partition(".")[0] for name in places}  # first components of built parts; others belong to towers
    wrong: dict[str, list[str]] = {}  # error text -> tensors
    left_over, skipped = [], 0
    for shard in shards:
        for name, info in shard.tensors.items():
            canonical = table.canonical(name)
            place = places.get(canonical)
            left_out = model.config.left_out and canonical.partition(".")[0] not in built
            if place is None and (left_out or table.ignored(canonical) or is_cache_scale(canonical)):
                skipped += not is_cache_scale(canonical)  # engine/quant/kv.py reads these
            elif place is None:
                left_over.append(name)
            elif canonical in present:
                wrong.setdefault("is there twice, under different prefixes", []).append(name)
            elif info.shape != place.wanted.shape:
                said = f"has shape {list(info.shape)}, the configuration asks for {list(place.wanted.shape)}"
                wrong.setdefault(said, []).append(name)
            elif DTYPES.get(info.dtype) not in place.wanted.dtypes:
                readable = ", ".join(key for key, dtype in DTYPES.items() if dtype in place.wanted.dtypes)
                wrong.setdefault(f"has dtype {info.dtype}, readable are {readable}", []).append(name)
            else:
                names[name] = canonical
            present.add(canonical)
    missing = [name for name in places if name not in present]
    report = _counted_names("missing", missing) + _counted_names("left over", left_over)
    report += [f"{compact(found)} {what}" for what, found in wrong.items()]
    if "lm_head.weight" in missing:
        report.append("""where the embedding is the head too, --hf-overrides '{"tie_word_embeddings": true}' says so""")
    if report:
        raise ConfigError(f"{folder}: the weights do not fit the configuration; {'; '.join(report)}")
    if skipped and not table.partial:
        log.info("%s: %d tensors that serving does not read were skipped", folder, skipped)
    return names


def _counted_names(word: str, names: list[str]) -> list[str]:
    return [f"{len(names)} {word}: {compact(names)}"] if names else []


def _map(shards: list[Shard], names: dict[str, str], pieces: Pieces, report: Callable[[int], None]) -> None:
    """Adds views of the mapped files, file after file; each part copies the data that it needs."""
    for shard in shards:
        with shard.open() as reader:
            for name, info in shard.tensors.items():
                if name in names:
                    pieces.add(names[name], reader.tensor(name))
                    report(info.num_bytes)


def _draw_all(
    places: dict[str, Place], pieces: Pieces, saved: dict[str, torch.dtype], seed: int, report: Callable[[int], None]
) -> None:
    for name, place in places.items():
        pieces.add(name, draw(name, pieces.room(name), seed))
        report(torch.Size(place.wanted.shape).numel() * saved[name].itemsize)
