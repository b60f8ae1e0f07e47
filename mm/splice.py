"""Splice: inserts processed media into the prompt, in one pass.

Loop. In: token ids with one placeholder per item, the placeholders' places from the renderer, and the processed items.
Out: the expanded prompt, a MediaInput per part, and the positions of every token. Placeholders are never searched among
the tokens, and a media token at any other place is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from engine.base.request import ROWS, MediaInput, Modality
from mm.client_rows import ClientRows
from mm.errors import MediaError
from mm.item import Processed
from mm.processors.base import Filling, Placed, Processor


@dataclass(frozen=True, slots=True)
class Spliced:
    """The media part of a Request."""

    prompt_token_ids: np.ndarray  # int32 [prompt_len]
    media: tuple[MediaInput, ...] = ()
    positions: np.ndarray | None = None  # int32 [axes, prompt_len]
    position_delta: int = 0
    counts: dict[Modality, int] = field(default_factory=dict)  # prompt tokens per modality, for usage


def splice(
    token_ids: Sequence[int] | np.ndarray,
    slots: Sequence[int],
    processed: Sequence[Processed],
    processor: Processor | None,
    rows: Sequence[tuple[int, ClientRows]] = (),
) -> Spliced:
    """Expand each slot to its item's tokens; MediaError 400 `placeholder_mismatch` if prompt and media disagree.

    `rows`: a client's rows in place of text, and where their ids begin in `token_ids`.
    """
    ids = np.asarray(token_ids, dtype=np.int32)  # [length before]
    if processor is None:
        if slots or processed:
            raise _mismatch("this model reads text only")
        return Spliced(ids, tuple(_of_text(start, given) for start, given in rows), None, 0, {})
    _check(ids, slots, processed, processor)
    pieces: list[np.ndarray] = []
    placed: list[Placed] = []
    done, length = 0, 0
    for slot, item in zip(slots, numbered(processed)):
        filling = processor.fill(item)
        pieces += (ids[done:slot], filling.token_ids)
        start = length + slot - done
        placed.append(Placed(start, filling, item))
        done, length = slot + 1, start + len(filling.token_ids)
    pieces.append(ids[done:])
    widened = np.concatenate(pieces)
    media = tuple(entry for place in placed for entry in _inputs(place, len(widened)))
    counts: Counter[Modality] = Counter()
    for place in placed:
        tokens = len(place.filling.token_ids)
        for part, runs in zip(place.processed.parts, place.filling.runs):
            counts[part.modality] += sum(min(length, tokens - first) for first, length in runs)
    positions, delta = processor.positions(len(widened), widened, placed)
    wider = [(slot, len(place.filling.token_ids) - 1) for slot, place in zip(slots, placed)]
    moved = [(start + sum(more for slot, more in wider if slot < start), given) for start, given in rows]
    media += tuple(_of_text(start, given) for start, given in moved)
    return Spliced(widened, media, positions, delta, dict(counts))


def numbered(processed: Sequence[Processed]) -> list[Processed]:
    """The items of a prompt, each with its number among the items of its modality."""
    counts: Counter[Modality] = Counter()
    found = []
    for item in processed:
        number = counts[item.modality]
        counts[item.modality] += 1
        found.append(item if number == item.number else replace(item, number=number))
    return found


def _of_text(start: int, rows: ClientRows) -> MediaInput:
    count = len(rows.numbers)
    return MediaInput("prompt", rows.digest, ((start, count),), count, {ROWS: rows.numbers})


def _check(ids: np.ndarray, slots: Sequence[int], processed: Sequence[Processed], processor: Processor) -> None:
    if len(slots) != len(processed):
        raise _mismatch(f"the prompt has {len(slots)} media placeholders for {len(processed)} media items")
    if len(slots) and not (slots[0] >= 0 and slots[-1] < len(ids) and all(a < b for a, b in pairwise(slots))):
        raise _mismatch("the prompt's media placeholders are out of order")
    for slot, item in zip(slots, processed):
        if ids[slot] != processor.placeholder(item.modality):
            raise _mismatch(f"the prompt has no placeholder where an item of kind {item.modality} stands")
    stray = sum(np.count_nonzero(ids == token_id) for token_id in processor.media_token_ids) - len(slots)
    if stray:
        raise _mismatch(
            f"the prompt holds {stray} media tokens that belong to no media item; remove them from the text"
        )


def _inputs(place: Placed, prompt_len: int) -> list[MediaInput]:
    """One MediaInput per part. Error 500 if the processor places another number of rows than it announced."""
    inputs = []
    ends_prompt = place.start + len(place.filling.token_ids) == prompt_len
    for part, runs in zip(place.processed.parts, place.filling.runs, strict=True):
        if (
            sum(length for _, length in runs) != part.num_tokens
            or part.num_tokens < 1
            or not _ascending(place.filling, runs)
        ):
            raise MediaError(500, "internal_error", "the media processor contradicts itself")
        if sum(runs[-1]) > len(place.filling.token_ids) and not ends_prompt:
            raise _mismatch(f"this model takes {part.modality} while it answers: nothing may follow it in the prompt")
        spans = tuple((place.start + start, length) for start, length in runs)
        inputs.append(MediaInput(part.modality, part.hash, spans, part.num_tokens, part.features))
    return inputs


def _ascending(filling: Filling, runs: tuple[tuple[int, int], ...]) -> bool:
    """Whether each run begins after the run before it, and inside the filling."""
    end = 0
    for start, length in runs:
        if start < end or start >= len(filling.token_ids) or length < 1:
            return False
        end = start + length
    return True


def _mismatch(message: str) -> MediaError:
    return MediaError(400, "placeholder_mismatch", message)
