"""Rendered prompts: token ids in which each media placeholder is already repeated for all of its rows.

Owner: loop. Out, for the render endpoints: each item's hash and place. In, for /inference/v1/generate: the same, and
the token ids. A hash finds only items that the same caller has uploaded to this process. The tokens at an item's place
are compared with those that the processor would write, and then replaced by a single placeholder, so that splicing gets
the renderer's form (SECURITY S24).

    ids [a V V V b], hash, (1, 3)  ->  ids [a V b], slots (1,), Processed  ->  splice
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from engine.base.request import MediaInput, Modality
from mm.cache import ProcessorCache
from mm.item import MediaRef, Processed
from mm.processors.base import Processor
from mm.splice import numbered
from server.render.errors import RenderError
from server.schema.generate import Features

PARAM = "features"


@dataclass(frozen=True, slots=True)
class Narrow:
    """The prompt in the renderer's form: one placeholder per item."""

    token_ids: list[int]
    refs: list[MediaRef]
    processed: list[Processed]


def features_of(media: tuple[MediaInput, ...]) -> dict[str, Any] | None:
    """The field `features` of a rendered prompt; None without media."""
    if not media:
        return None
    hashes: dict[str, list[str]] = {}
    places: dict[str, list[dict[str, int]]] = {}
    for item in sorted(media, key=lambda item: item.spans[0]):
        start, (last, length) = item.spans[0][0], item.spans[-1]
        hashes.setdefault(item.modality, []).append(item.hash.hex())
        places.setdefault(item.modality, []).append({"offset": start, "length": last + length - start})
    return {"mm_hashes": hashes, "mm_placeholders": places}


def narrowed(ids: list[int], features: Features, processor: Processor, cache: ProcessorCache, scope: bytes) -> Narrow:
    """Find every item and shrink its tokens to one placeholder; raises RenderError if prompt and item disagree."""
    found = Narrow([], [], [])
    given = np.asarray(ids, np.int64)
    done = 0
    for offset, length, modality, name in listed(features):
        found.processed.append(known(cache, scope, modality, name))
        filling = processor.fill(numbered(found.processed)[-1])
        first = filling.runs[0][0][0]
        last, rows = filling.runs[0][-1]
        start, end = offset - first, offset - first + len(filling.token_ids)
        if length != last + rows - first or start < done or end > len(ids):
            raise mismatch(f"the {modality} at offset {offset} needs {last + rows - first} tokens there")
        if not np.array_equal(given[start:end], filling.token_ids):
            raise mismatch(f"the tokens at offset {offset} are not those of a {modality}")
        found.token_ids.extend(ids[done:start])
        found.token_ids.append(processor.placeholder(modality))
        found.refs.append(MediaRef(modality, None, param=PARAM))
        done = end
    found.token_ids.extend(ids[done:])
    return found


def listed(features: Features) -> list[tuple[int, int, Modality, str]]:
    """(offset, length, modality, hash) of every item, in prompt order."""
    found: list[tuple[int, int, Modality, str]] = []
    if features.mm_hashes.keys() != features.mm_placeholders.keys():
        raise mismatch("mm_hashes and mm_placeholders name different modalities")
    for modality, names in features.mm_hashes.items():
        places = features.mm_placeholders[modality]
        if len(names) != len(places):
            raise mismatch(f"{len(names)} hashes for {len(places)} places")
        if modality not in ("image", "audio", "video"):
            raise mismatch("modalities are image, audio and video")
        found += [(place.offset, place.length, cast(Modality, modality), name) for name, place in zip(names, places)]
    return sorted(found)


def known(cache: ProcessorCache, scope: bytes, modality: Modality, name: str) -> Processed:
    """The processed item that this caller uploaded, by its hash."""
    try:
        digest = bytes.fromhex(name)
    except ValueError:
        digest = b""
    processed = cache.get((scope, digest))
    if processed is None or processed.modality != modality:
        raise RenderError(
            400, "media_unknown", "no media of this hash was rendered here for this key; render it again", PARAM
        )
    return processed


def mismatch(message: str) -> RenderError:
    return RenderError(400, "placeholder_mismatch", f"{PARAM}: {message}", PARAM)
