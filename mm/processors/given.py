"""Given: rows that a client sends for an item in place of an encoder's output (SECURITY S32).

Pool. In: rows and, for pictures and films of families with grids, the patches along time, rows and columns. Out: a
Processed item that needs no encoder. Families that write more tokens into a prompt than an item's rows refuse such
rows: pictures in tiles with separators, and films with their frames' times.
"""

from __future__ import annotations

import numpy as np

from engine.base.request import ROWS, Modality
from mm.client_rows import ClientRows, digest_of
from mm.errors import MediaError, unsupported
from mm.item import Part, Processed
from mm.processors.base import Processor
from mm.processors.fun_audio import FunAudio
from mm.processors.granite_speech import GraniteSpeech
from mm.processors.llava import Llava
from mm.processors.midashenglm import MiDashengLM
from mm.processors.qwen2_audio import Qwen2Audio
from mm.processors.qwen3_asr import Qwen3Asr
from mm.processors.qwen_omni import QwenOmni
from mm.processors.qwen_vl import QwenVL
from mm.processors.ultravox import Ultravox

# Families whose prompts have one token for each row of a sound, and nothing else.
SOUNDS = (FunAudio, GraniteSpeech, MiDashengLM, Qwen2Audio, Qwen3Asr, QwenOmni, Ultravox)


def given(
    processor: Processor, modality: Modality, rows: ClientRows, grid: np.ndarray | None, seconds: float | None = None
) -> Processed:
    """The item with these rows; MediaError if the family refuses such rows, or the grid does not fit them.

    `seconds`: between two of a film's lines of patches along time; None: as if the film had the family's usual rate.
    """
    numbers = rows.numbers
    features: dict[str, np.ndarray] = {ROWS: numbers}
    if modality == "audio":
        takes = isinstance(processor, SOUNDS)
    else:
        takes = isinstance(processor, QwenVL | QwenOmni) or (modality == "image" and isinstance(processor, Llava))
        takes = takes and not (modality == "video" and processor.writes_texts)
    if not takes:
        raise unsupported(f"this model takes no {modality}_embeds; send the {modality}")
    if modality != "audio" and isinstance(processor, QwenVL | QwenOmni):
        merge, moves = processor.vision.image.merge_size, modality == "video"
        frames = processor.frames_of_row if moves and isinstance(processor, QwenVL) else 1
        check_grid(f"{modality}_grid_thw", grid, len(numbers), merge, moves, frames)
        assert grid is not None, "check_grid refuses an item without a grid"
        features["grid_thw"] = grid
        if modality == "video":
            usual = processor.vision.video.temporal_patch_size / processor.vision.rule.fps
            features["second_per_grid"] = np.array([seconds or usual], np.float32)
    elif grid is not None:
        raise _refused(f"{modality}_grid_thw: this model's {modality}s have no grid; leave it out")
    digest = rows.digest if grid is None else digest_of(*features.values())
    return Processed(modality, (Part(modality, digest, len(numbers), features),))


def check_grid(name: str, grid: np.ndarray | None, count: int, merge: int, moves: bool, frames: int = 1) -> None:
    """Refuse a grid [1, 3] that does not have `count` groups of frames x merge x merge patches; `moves`: of several
    times."""
    if grid is None:
        raise _refused(f"{name}: is missing; send the grid of the patches with the rows")
    time, height, width = grid[0].tolist()
    whole = not (height % merge or width % merge or time % frames)
    if (time != 1 and not moves) or not whole or time * height * width != count * frames * merge**2:
        times = ("a number of times" if frames == 1 else f"a multiple of {frames}") if moves else "1"
        raise _refused(
            f"{name}: got {grid[0].tolist()} for {count} rows; {times} and two multiples of {merge} with "
            f"{count * frames * merge**2} as the product of all are needed"
        )


def _refused(message: str) -> MediaError:
    return MediaError(400, "embedding_invalid", message)
