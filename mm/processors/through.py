"""Through: pictures and sounds of models that run through transformers, by the checkpoint's own processor.

Pool (`process`) and loop (`fill`, `positions`). transformers is imported when such a model is served; a checkpoint's
code is never run. In: a picture or a sound. Out: the arrays that the processor makes of it, without the tokens, and the
tokens that it writes in place of the template's token. If the tokens of an item depend on the prompt's other items, the
processor is refused at start.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from engine.base.request import Modality
from mm.decode.frames import FilmPlan
from mm.errors import MediaError, unsupported
from mm.item import MediaItem, MediaOptions, Part, Processed
from mm.limits import MediaLimits
from mm.processors.base import Filling, Placed
from mm.transform.image import Scale

TOKENS = "token_ids"  # the feature that holds an item's tokens
OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
RATE = 16_000  # samples per second of decoded sounds
TYPES: dict[Modality, int] = {"image": 1, "video": 2, "audio": 3}  # type ids of tokens, as in transformers
Shapes = tuple[tuple[int, ...], ...]
BLANK: dict[Modality, Shapes] = {  # items for a test of the processor's tokens at start
    "image": ((384, 512, 3), (512, 320, 3)),
    "audio": ((RATE * 3,), (RATE,)),
}
NAMES: dict[Modality, str] = {"image": "image", "video": "video", "audio": "audio item"}


class Through:
    """The processor of a checkpoint that runs through transformers."""

    modalities: frozenset[Modality] = frozenset(("image", "audio"))
    writes_texts: ClassVar[bool] = False
    picture_bytes: int = 0
    longest_sound: float = math.inf
    blank: ClassVar[dict[Modality, Shapes]] = BLANK

    def __init__(self, folder: str | Path, config: dict[str, Any], picture_bytes: int = 0) -> None:
        from transformers import AutoConfig, AutoProcessor

        try:
            self.processor = AutoProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            self.config = AutoConfig.for_model(**config)
        except Exception as error:
            raise ValueError(f"its processor cannot be made by transformers: {_line(error)}") from None
        self.marks: dict[Modality, str] = {}  # the text that templates write for an item
        self.mark_ids: dict[Modality, int] = {}
        self.row_ids: dict[Modality, int] = {}  # the token of an encoder's row
        for kind in self.blank:
            if (token := getattr(self.config, f"{kind}_token_id", None)) is not None:
                self._name(kind, int(token))
        self.modalities = frozenset(self.marks)
        self.media_token_ids = frozenset((*self.mark_ids.values(), *self.row_ids.values()))
        self._axes = _axes_of(self.config, str(config["architectures"][0]))
        self._blank_bytes = {kind: self._check(kind) for kind in self.marks}

    def _name(self, kind: Modality, token: int) -> None:
        mark = str(getattr(self.processor, f"{kind}_token", None) or "")
        written = self.processor.tokenizer.encode(mark, add_special_tokens=False) if mark else []
        if len(written) != 1:
            raise ValueError(
                f"its processor has no single token for the place of the {NAMES[kind]} ({kind}_token={mark!r})"
            )
        self.marks[kind], self.mark_ids[kind], self.row_ids[kind] = mark, int(written[0]), token
        extractor = getattr(self.processor, "feature_extractor", None) if kind == "audio" else None
        if (rate := getattr(extractor, "sampling_rate", RATE)) != RATE:
            raise ValueError(f"its processor takes audio at {rate} samples a second; audio is decoded to {RATE}")

    def placeholder(self, modality: Modality) -> int:
        return self.mark_ids[modality]

    def settings(self, modality: Modality, options: MediaOptions) -> bytes:
        return repr((type(self).__name__, options.max_pixels if modality == "image" else None)).encode()

    def cost(self, modality: Modality, item_bytes: int) -> int:
        # float32 of all pixels, and of small pictures scaled up; sounds are float32 already, and their mels are smaller
        return 16 * item_bytes + 2 * self._blank_bytes[modality]

    def plan_image(self, height: int, width: int, options: MediaOptions) -> Scale:
        """The picture's own size, within the request's bound: the processor scales the picture."""
        most = options.max_pixels or height * width
        share = min(1.0, math.sqrt(most / (height * width)))
        return Scale(max(1, int(height * share)), max(1, int(width * share)))

    def plan_film(
        self, num_frames: int, fps: float, height: int, width: int, options: MediaOptions, limits: MediaLimits
    ) -> FilmPlan:
        raise unsupported("this model does not read videos")

    def process(self, item: MediaItem, digest: bytes, options: MediaOptions) -> Processed:
        kind = item.modality
        try:
            features = self._made(kind, self.marks[kind], [item])
        except Exception as error:  # the processor refuses a size or shape
            raise MediaError(
                400, "media_unsupported", f"this model's processor refuses the {NAMES[kind]}: {_line(error)}"
            ) from None
        count = int(np.count_nonzero(features[TOKENS] == self.row_ids[kind]))
        if not count:
            text = f"this model's processor makes no token of the {NAMES[kind]} of this size; send a larger one"
            raise MediaError(400, "media_unsupported", text)
        return Processed(kind, (Part(kind, digest, count, features),))

    def fill(self, processed: Processed) -> Filling:
        (part,) = processed.parts
        ids = part.features[TOKENS]
        return Filling(ids.astype(np.int32), (runs_of(ids == self.row_ids[part.modality]),))

    def positions(self, length: int, token_ids: np.ndarray, placed: list[Placed]) -> tuple[np.ndarray | None, int]:
        if self._axes is None or not placed:
            return None, 0
        import torch

        ids = torch.from_numpy(token_ids.astype(np.int64))[None]
        kinds = sum((ids == token).int() * TYPES[kind] for kind, token in self.row_ids.items())
        parts = [part.features for place in placed for part in place.processed.parts]
        more: dict[str, Any] = {}
        for name in inspect.signature(self._axes.get_rope_index).parameters:
            if of_items := [features[name] for features in parts if name in features]:
                more[name] = torch.from_numpy(np.concatenate(of_items))
        found, _ = self._axes.get_rope_index(ids, mm_token_type_ids=kinds, attention_mask=torch.ones_like(ids), **more)
        # The answer's positions continue from the last token, even if a film's time axis is further.
        return found[:, 0].numpy().astype(np.int32), int(found[:, 0, -1].max()) + 1 - length

    def processor_inputs(self, kind: Modality, items: Sequence[MediaItem]) -> dict[str, Any]:
        """Items in the form that the processor takes."""
        from PIL import Image

        if kind == "image":
            return {"images": [Image.fromarray(item.data) for item in items]}
        return {"audio": [np.array(item.data) for item in items], "sampling_rate": RATE}

    def blank_item(self, kind: Modality, shape: tuple[int, ...]) -> MediaItem:
        """A black picture or a silent sound of this shape."""
        return MediaItem(kind, np.zeros(shape, np.float32 if kind == "audio" else np.uint8))

    def _made(self, kind: Modality, text: str, items: Sequence[MediaItem]) -> dict[str, np.ndarray]:
        """The arrays that the processor makes of items in a text, and the text's token ids."""
        processor_inputs = self.processor_inputs(kind, items)
        made = self.processor(text=[text], add_special_tokens=False, return_tensors="pt", **processor_inputs)
        found = {name: value.numpy() for name, value in made.items() if name not in OF_TEXT and hasattr(value, "numpy")}
        return {**found, TOKENS: made["input_ids"][0].numpy()}

    def _check(self, kind: Modality) -> int:
        """Bytes of a blank item's features; ValueError if its tokens depend on other items."""
        mark, row, name = self.marks[kind], self.row_ids[kind], NAMES[kind]
        first, second = (self.blank_item(kind, shape) for shape in self.blank[kind])
        try:
            alone = [self._made(kind, mark, [item]) for item in (first, second)]
        except Exception as error:
            raise ValueError(f"its processor fails with a blank {name}: {_line(error)}") from None
        if any(not np.any(each[TOKENS] == row) for each in alone):
            raise ValueError(f"its processor writes no token {row} where {name} stands")
        text, items = f"a{mark}b{mark}{mark}c", [first, second, first]
        written = self.processor.tokenizer.encode(text, add_special_tokens=False)
        ids = iter([alone[0][TOKENS], alone[1][TOKENS], alone[0][TOKENS]])
        want = np.concatenate([next(ids) if token == self.mark_ids[kind] else [token] for token in written])
        try:
            together = self._made(kind, text, items)[TOKENS]
        except Exception as error:
            if kind != "audio":
                raise ValueError(f"its processor fails with three blank {name}s: {_line(error)}") from None
            together = want  # some processors take a single sound per text and write it in the same way
        if not np.array_equal(want, together):
            raise ValueError(f"its processor writes {name}s of one prompt otherwise than each of them alone")
        return max(sum(array.nbytes for array in each.values()) for each in alone)


def runs_of(processor_inputs: np.ndarray) -> tuple[tuple[int, int], ...]:
    """(start, length) of each run of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], processor_inputs.astype(np.int8), [0]])))
    return tuple((int(start), int(end - start)) for start, end in edges.reshape(-1, 2))


def _axes_of(config: Any, architecture: str) -> Any:
    """An instance of the model's class without parameters, which computes positions on several axes; None without such
    axes.
    """
    import sys

    import transformers
    from torch import nn

    module = sys.modules[getattr(transformers, architecture).__module__]
    base = getattr(module, architecture.replace("ForConditionalGeneration", "Model"), None)
    if base is None or not hasattr(base, "get_rope_index"):
        return None
    counting = base.__new__(base)
    nn.Module.__init__(counting)
    counting.config = config
    return counting


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
