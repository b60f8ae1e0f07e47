"""Given: rows that a client sends for a picture in place of an encoder's output (SECURITY S32).

Pool. In: rows and, for families with grids, the picture's patches along time, rows and columns. Out: a Processed item
that needs no encoder. Families that write more tokens into a prompt than a picture's rows refuse such rows.
"""

from __future__ import annotations

import numpy as np

from engine.base.request import ROWS, Modality
from mm.client_rows import ClientRows, digest_of
from mm.errors import MediaError, unsupported
from mm.item import Part, Processed
from mm.processors.base import Processor
from mm.processors.llava import Llava
from mm.processors.qwen_omni import QwenOmni
from mm.processors.qwen_vl import QwenVL


def given(processor: Processor, modality: Modality, rows: ClientRows, grid: np.ndarray | None) -> Processed:
    """The item with these rows; MediaError if the family refuses such rows, or the grid does not fit them."""
    numbers = rows.numbers
    features: dict[str, np.ndarray] = {ROWS: numbers}
    if isinstance(processor, QwenVL | QwenOmni):
        merge = processor.vision.image.merge_size
        if grid is None:
            raise _refused("image_grid_thw: is missing; send the grid of the image's patches with its rows")
        time, height, width = grid[0].tolist()
        if time != 1 or height % merge or width % merge or height * width != len(numbers) * merge**2:
            patches = len(numbers) * merge**2
            raise _refused(
                f"image_grid_thw: got {grid[0].tolist()} for {len(numbers)} rows; 1 and two multiples of {merge} with "
                f"{patches} as their product are needed"
            )
        features["grid_thw"] = grid
    elif not isinstance(processor, Llava):
        raise unsupported("this model takes no image_embeds; send the image")
    elif grid is not None:
        raise _refused("image_grid_thw: this model's images have no grid; leave it out")
    digest = rows.digest if grid is None else digest_of(numbers, grid)
    return Processed(modality, (Part(modality, digest, len(numbers), features),))


def _refused(message: str) -> MediaError:
    return MediaError(400, "embedding_invalid", message)
