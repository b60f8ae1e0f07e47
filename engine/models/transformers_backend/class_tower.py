"""ClassTower: the tower and projector of a transformers class, with the engine's Tower interface.

Thread: device. In: the arrays that the checkpoint's own processor made of an item (mm/processors/through).
Out: rows, from a run that may pause between layers. Items whose arrays differ only in the first dimension may share a
run. Before the first shared run, noise is passed through the class to test whether items in a run affect each other;
on accelerators the test is at start.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.base.errors import RequestError, is_out_of_memory, scope_of
from engine.base.model_config import ModelConfig
from engine.base.request import Modality
from engine.encoders.tower import TOGETHER, Features, Pieces, Record, Shapes
from engine.models.transformers_backend.pausing import in_pieces, let_pause, stacks_of
from engine.models.transformers_backend.showing import ITEMS, arguments, encoders

log = logging.getLogger("omniloop.engine")

PATCH = 3 * 14 * 14  # values of an assumed patch
TOKENS = "token_ids"  # the feature that holds an item's tokens
RATE = 16_000  # samples a second
SIDES = (2048, 1024, 512, 256, 128, 64)  # sides of blank pictures, in pixels
FILMS = ((16, 448), (8, 448), (8, 224), (4, 112), (2, 56))  # blank videos: frames, side in pixels
SAMPLES = tuple(RATE * tenths // 10 for tenths in (600, 300, 100, 50, 20, 10, 5, 2))  # lengths of silence
NEAR = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}  # rounding error relative to the maximum


class ClassTower:
    """The tower for one modality."""

    together = TOGETHER

    def __init__(
        self, kind: Modality, base: Any, num_layers: int, config: ModelConfig, dtype: torch.dtype, device: str
    ) -> None:
        """`num_layers`: layers of the tower after which a run may pause (pausing.let_pause)."""
        self._config, self._dtype, self._device = config, dtype, device
        self.modalities: tuple[Modality, ...] = (kind,)
        self.row_width = config.text.hidden_size
        self._run = encoders(base)[kind]
        self._takes = sorted(arguments(self._run))
        self._needs = next(iter(inspect.signature(self._run).parameters))
        self._token = config.media_token_ids[kind]
        self._num_layers = num_layers
        self.keeps_apart: bool | None = None  # items in a run do not affect each other; None: not tested yet

    def encode(self, features: Features) -> Tensor:
        return self._rows(self._given(features))

    def weight(self, features: Shapes) -> int:
        """An estimate of the number of patches, because classes do not state the size of a patch."""
        numbers = max(math.prod(features[name].shape) for name in self._takes if name in features)
        return max(self._count(features), numbers // PATCH)

    def pieces(self, items: Sequence[Features]) -> Pieces:
        weight = sum(self.weight(features) for features in items)
        return in_pieces(lambda: self.encode_together(items), weight, self._num_layers)

    def encode_together(self, items: Sequence[Features]) -> list[Tensor]:
        """Items with equal shapes share a run; other items run alone."""
        given = [self._given(features) for features in items]
        alike: dict[Any, list[int]] = {}
        for number, each in enumerate(given):
            alike.setdefault(tuple((name, part.shape[1:]) for name, part in each.items()), []).append(number)
        found: dict[int, Tensor] = {}
        for group in alike.values():
            some, counts = [given[number] for number in group], [self._count(items[number]) for number in group]
            rows = self._shared(some, counts) if len(group) > 1 else None
            found.update(zip(group, rows or [self._rows(each) for each in some]))
        return [found[number] for number in range(len(items))]

    def example(self, modality: Modality, rows: int) -> Features:
        """The processor's features of a blank picture, a blank video or silence."""
        return blank(self._config.folder, modality, self._token, rows)

    def picture_bytes(self, rows: int) -> int:
        return 0

    def record(self, record: Record) -> None:
        """Does nothing: the tower runs without graphs."""

    def _count(self, features: Shapes) -> int:
        """Rows of an item."""
        return int((features[TOKENS] == self._token).sum())

    def _given(self, features: Features) -> Features:
        given = {name: self._placed(features[name]) for name in self._takes if name in features}
        if self._needs not in given:
            raise RequestError(f"the processor made {', '.join(features)}; {self._needs} are needed")
        return given

    def _placed(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, self._dtype if tensor.is_floating_point() else None)

    def _rows(self, given: Features) -> Tensor:
        found = self._run(**given, return_dict=True)
        rows = getattr(found, "pooler_output", found)
        rows = torch.cat(list(rows)) if isinstance(rows, list | tuple) else rows
        return rows.reshape(-1, rows.shape[-1])

    def _shared(self, items: list[Features], counts: list[int]) -> list[Tensor] | None:
        """New tensors with the rows of each item; None: the items must run alone."""
        if self.keeps_apart is None:
            self.keeps_apart = self._tried(items, counts)
            kept = "share" if self.keeps_apart else "do not share"
            log.info("%ss of several requests %s runs of transformers' tower", ITEMS[self.modalities[0]], kept)
        return self._together(items, counts) if self.keeps_apart else None

    def _together(self, items: list[Features], counts: list[int]) -> list[Tensor] | None:
        rows = self._rows({name: torch.cat([each[name] for each in items]) for name in items[0]})
        return [own.clone() for own in rows.split(counts)] if len(rows) == sum(counts) else None

    def _tried(self, items: list[Features], counts: list[int]) -> bool:
        """Whether a shared run gives each item the rows of a run alone. Noise is added, because blank items would be
        equal."""
        draw = torch.Generator().manual_seed(0)

        def noisy(part: Tensor) -> Tensor:
            if not part.is_floating_point():
                return part
            return part + torch.randn(part.shape, generator=draw).to(part.device, part.dtype)

        drawn = [{name: noisy(part) for name, part in each.items()} for each in items]
        try:
            alone, together = [self._rows(each) for each in drawn], self._together(drawn, counts)
        except Exception as error:
            if is_out_of_memory(error) or scope_of(error) == "device":
                raise
            return False
        if together is None or [len(rows) for rows in alone] != counts:
            return False
        limit = NEAR[self._dtype] * max(float(rows.abs().max()) for rows in alone)
        return all(float((rows - want).abs().max()) <= limit for rows, want in zip(together, alone))


def class_towers(
    kinds: Sequence[Modality], base: Any, decoder: Any, config: ModelConfig, dtype: torch.dtype, device: str
) -> list[ClassTower]:
    """A tower for each modality that a class encodes outside its decoder."""
    num_layers = let_pause(stacks_of(base, decoder))
    return [ClassTower(kind, base, num_layers, config, dtype, device) for kind in kinds]


@cache
def blank(folder: str, kind: Modality, token: int, rows: int) -> Features:
    """The features of the largest blank item with at most `rows` rows, else of the smallest blank item."""
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    made: Any = {}
    for blank in _blanks(kind):
        mark = getattr(processor, f"{kind}_token")
        made = processor(text=[mark], add_special_tokens=False, return_tensors="pt", **blank)
        if int((made["input_ids"] == token).sum()) <= rows:
            break
    return {name: value for name, value in made.items() if isinstance(value, Tensor)} | {TOKENS: made["input_ids"][0]}


def _blanks(kind: Modality) -> Iterator[dict[str, Any]]:
    """Arguments of a processor for blank items, the largest first."""
    from PIL import Image

    if kind == "image":
        yield from ({"images": [Image.new("RGB", (side, side))]} for side in SIDES)
    elif kind == "audio":
        yield from ({"audio": [np.zeros(size, "f4")], "sampling_rate": RATE} for size in SAMPLES)
    for frames, side in FILMS if kind == "video" else ():
        metadata = {
            "total_num_frames": frames,
            "fps": 1.0,
            "duration": float(frames),
            "frames_indices": [*range(frames)],
        }
        film = np.zeros((frames, side, side, 3), np.uint8)
        yield {"videos": [film], "video_metadata": [metadata], "do_sample_frames": False}
