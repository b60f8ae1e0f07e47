"""Turns samples into arrays: tokens, three-axis positions, labels, patches, waveforms. Runs in worker processes.

One `Row` per sample; `pack` joins rows into one batch without padding: sequences are concatenated, and their lengths
separate them. The results equal those of transformers' processor for this checkpoint: smart resize and bicubic for
pictures, two frames a token for films, Whisper's frame counts for sound, and `get_rope_index` for positions. Labels are
-100 except on answers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from examples.embedded_model import blueprint as bp
from examples.embedded_model.films import moments
from examples.embedded_model.sample import Media, Sample

FACTOR = bp.PATCH * bp.MERGE
WINDOW = 112 // FACTOR  # merged tokens on each side of a window
MAX_AUDIO = bp.AUDIO_WINDOW * 2 * bp.HOP  # samples in one chunk of the audio tower
ID = bp.TOKEN_ID
TABLE = ("image_object", "image_scene", "image_print", "audio_digits", "audio_commands", "audio_tones", "video", "video_sound",
         "text_arithmetic", "text_counting", "text_letters", "text_sorting", "text_calendar", "text_units", "text_talk",
         "text_unknown", "text_paragraph", "json")  # fmt: skip
TAUGHT = ("tool_call", "tool_answer", "schema", "image_sided")  # rows that teach_tools.py adds
ROWS = TABLE + TAUGHT


@dataclass
class Row:
    """One sample as arrays. The last array of each picture, film and sound has the indices in `ids` of its tokens."""

    ids: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    positions: list[np.ndarray] = field(default_factory=list)  # pieces [3, n]
    turn_of: list[int] = field(default_factory=list)  # index of the turn whose answer has this label, or -1
    tasks: list[int] = field(default_factory=list)  # row of the accuracy table, for each turn
    pictures: list[tuple[np.ndarray, tuple[int, int, int], np.ndarray]] = field(default_factory=list)
    films: list[tuple[np.ndarray, tuple[int, int, int], np.ndarray]] = field(default_factory=list)
    sounds: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    next: int = 0  # the position that the next token gets


def fit(height: int, width: int, low: int, high: int) -> tuple[int, int]:
    """Sides that are multiples of 28, with an area between the two limits and nearly the old proportions."""
    new_h, new_w = round(height / FACTOR) * FACTOR, round(width / FACTOR) * FACTOR
    if new_h * new_w > high:
        shrink = math.sqrt(height * width / high)
        new_h = max(FACTOR, math.floor(height / shrink / FACTOR) * FACTOR)
        new_w = max(FACTOR, math.floor(width / shrink / FACTOR) * FACTOR)
    elif new_h * new_w < low:
        grow = math.sqrt(low / (height * width))
        new_h, new_w = math.ceil(height * grow / FACTOR) * FACTOR, math.ceil(width * grow / FACTOR) * FACTOR
    return new_h, new_w


def patches(frames: list[np.ndarray], low: int, high: int) -> tuple[np.ndarray, tuple[int, int, int]]:
    """Frames [H, W, 3] -> uint8 rows, one for each patch over `depth` frames (1 for a still, 2 for a film)."""
    height, width = fit(*frames[0].shape[:2], low, high)
    small = [np.asarray(Image.fromarray(f).resize((width, height), Image.Resampling.BICUBIC)) for f in frames]
    depth = 1 if len(frames) == 1 else 2
    grid = (len(frames) // depth, height // bp.PATCH, width // bp.PATCH)
    block = np.stack(small).reshape(grid[0], depth, grid[1] // 2, 2, bp.PATCH, grid[2] // 2, 2, bp.PATCH, 3)
    block = block.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)  # time, row, column, sub-row, sub-column, channel, depth, y, x
    return block.reshape(math.prod(grid), 3 * depth * bp.PATCH * bp.PATCH), grid


def audio_tokens(num_samples: int) -> int:
    """25 tokens a second: mel frames, halved by the convolution and again by the pool."""
    frames = -(-num_samples // bp.HOP)
    return ((frames - 1) // 2 + 1 - 2) // 2 + 1


def _say(row: Row, ids: list[int], turn: int = -1) -> None:
    """Appends text tokens; all three axes of positions advance together."""
    row.ids += ids
    row.labels += ids if turn >= 0 else [-100] * len(ids)
    row.turn_of += [turn] * len(ids)
    row.positions.append(np.tile(np.arange(row.next, row.next + len(ids)), (3, 1)))
    row.next += len(ids)


def _fill(row: Row, token: int, positions: np.ndarray) -> np.ndarray:
    """Appends placeholders with positions relative to `next`; returns their indices."""
    start, count = len(row.ids), positions.shape[1]
    row.ids += [token] * count
    row.labels += [-100] * count
    row.turn_of += [-1] * count
    row.positions.append(positions + row.next)
    return np.arange(start, start + count)


def _grid_positions(grid: tuple[int, int, int], per_step: float) -> np.ndarray:
    """Positions [3, tokens] of a picture or film: time, row, column."""
    t, h, w = grid[0], grid[1] // bp.MERGE, grid[2] // bp.MERGE
    axes = np.meshgrid((np.arange(t) * per_step).astype(np.int64), np.arange(h), np.arange(w), indexing="ij")
    return np.stack([a.reshape(-1) for a in axes])


def _see(row: Row, media: Media) -> None:
    """Appends a picture between its two marks."""
    data, grid = patches([media.data], bp.IMAGE_MIN_PIXELS, bp.IMAGE_MAX_PIXELS)
    _say(row, [ID["<|vision_bos|>"]])
    where = _grid_positions(grid, bp.POSITIONS_PER_SECOND)
    row.pictures.append((data, grid, _fill(row, ID["<|IMAGE|>"], where)))
    row.next += int(where.max()) + 1
    _say(row, [ID["<|vision_eos|>"]])


def _hear(row: Row, media: Media) -> None:
    """Appends a sound between its two marks."""
    _say(row, [ID["<|audio_bos|>"]])
    count = audio_tokens(len(media.data))
    where = np.tile(np.arange(count), (3, 1))
    row.sounds.append((media.data, _fill(row, ID["<|AUDIO|>"], where)))
    row.next += count
    _say(row, [ID["<|audio_eos|>"]])


def kept_frames(media: Media) -> list[np.ndarray]:
    """The frames of a film that the server samples."""
    if media.rate <= bp.VIDEO_FPS:
        return list(media.data)
    times = moments(len(media.data) / media.rate, media.rate)
    return [media.data[min(len(media.data) - 1, round(t * media.rate))] for t in times]


def _watch(row: Row, media: Media) -> None:
    """Appends a film; with a sound track, frames and sound alternate every two seconds."""
    frames = kept_frames(media)
    if len(frames) % 2:
        frames = [*frames, frames[-1]]
    data, grid = patches(frames, bp.VIDEO_MIN_PIXELS, bp.VIDEO_MAX_PIXELS)
    where = _grid_positions(grid, bp.POSITIONS_PER_SECOND * 2 / bp.VIDEO_FPS)
    if media.sound is None:
        _say(row, [ID["<|vision_bos|>"]])
        row.films.append((data, grid, _fill(row, ID["<|VIDEO|>"], where)))
        row.next += int(where.max()) + 1
        _say(row, [ID["<|vision_eos|>"]])
        return
    _marks(row, "<|vision_bos|>", "<|audio_bos|>")
    chunk = bp.POSITIONS_PER_SECOND * bp.SECONDS_PER_CHUNK
    heard = np.tile(np.arange(audio_tokens(len(media.sound.data))), (3, 1))
    seen_at, heard_at = [], []
    last = 0
    for start in range(0, max(int(where[0].max()), heard.shape[1] - 1) + 1, chunk):
        for token, all_positions, places in ((ID["<|VIDEO|>"], where, seen_at), (ID["<|AUDIO|>"], heard, heard_at)):
            now = all_positions[:, (all_positions[0] >= start) & (all_positions[0] < start + chunk)]
            if now.shape[1]:
                places.append(_fill(row, token, now))
                last = int(now.max())
    row.films.append((data, grid, np.concatenate(seen_at)))
    row.sounds.append((media.sound.data, np.concatenate(heard_at)))
    row.next += last + 1
    _marks(row, "<|audio_eos|>", "<|vision_eos|>")


def _marks(row: Row, first: str, second: str) -> None:
    """Appends two marks that share one position, as the format requires."""
    row.ids += [ID[first], ID[second]]
    row.labels += [-100, -100]
    row.turn_of += [-1, -1]
    row.positions.append(np.full((3, 2), row.next))
    row.next += 1


class Encoder:
    """Holds the tokenizer and encodes samples."""

    def __init__(self, folder: Path = bp.MODEL_DIR) -> None:
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def ids(self, text: str) -> list[int]:
        """Tokens of a text; special tokens are recognised."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def row(self, sample: Sample) -> Row:
        """The whole conversation as arrays."""
        row = Row()
        before = f"<|im_start|>system\n{sample.system}<|im_end|>\n" if sample.system else ""
        for number, turn in enumerate(sample.turns):
            text = f"{before}<|im_start|>user\n"
            for part in turn.parts:
                if isinstance(part, str):
                    text += part
                    continue
                _say(row, self.ids(text))
                text = ""
                {"image": _see, "audio": _hear, "video": _watch}[part.kind](row, part)
            _say(row, self.ids(f"{text}<|im_end|>\n<|im_start|>assistant\n"))
            _say(row, [*self.ids(turn.answer), ID["<|im_end|>"]], number)
            before = "\n"
            row.tasks.append(ROWS.index(turn.task))
        return row


@cache
def window_order(grid: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Indices of merged tokens, window by window, and the number of patches in each window."""
    t, h, w = grid[0], grid[1] // bp.MERGE, grid[2] // bp.MERGE
    index = np.arange(t * h * w).reshape(t, h, w)
    pieces = [
        index[f, y : y + WINDOW, x : x + WINDOW].reshape(-1)
        for f in range(t)
        for y in range(0, h, WINDOW)
        for x in range(0, w, WINDOW)
    ]
    return np.concatenate(pieces), np.array([len(p) * bp.MERGE**2 for p in pieces], np.int32)


@cache
def patch_places(grid: tuple[int, int, int]) -> np.ndarray:
    """Row and column of every patch, [patches, 2], in the order in which `patches` writes them."""
    t, h, w = grid
    rows, columns = np.mgrid[0:h, 0:w]
    both = np.stack([rows, columns], -1).reshape(h // 2, 2, w // 2, 2, 2).transpose(0, 2, 1, 3, 4).reshape(-1, 2)
    return np.tile(both, (t, 1)).astype(np.int16)


def _lengths(values: list[int] | np.ndarray) -> torch.Tensor:
    """Running sums of the lengths, from zero: int32 [n + 1]."""
    return torch.from_numpy(np.concatenate([[0], np.cumsum(values)]).astype(np.int32))


def pack(rows: list[Row]) -> dict[str, torch.Tensor]:
    """Joins rows into the arrays of one training step."""
    starts = np.cumsum([0] + [len(r.ids) for r in rows])
    batch = {
        "ids": torch.tensor([i for r in rows for i in r.ids], dtype=torch.int32),
        "labels": torch.tensor([i for r in rows for i in r.labels], dtype=torch.int32),
        "positions": torch.from_numpy(np.concatenate([p for r in rows for p in r.positions], axis=1).astype(np.int32)),
        "ends": _lengths([len(r.ids) for r in rows]),
        "longest": torch.tensor(max(len(r.ids) for r in rows)),
    }
    firsts = np.cumsum([0] + [len(r.tasks) for r in rows])
    turns = [np.array(r.turn_of) + (np.array(r.turn_of) >= 0) * first for r, first in zip(rows, firsts, strict=False)]
    batch["turns"] = torch.from_numpy(np.concatenate(turns).astype(np.int32))  # number of the turn in the batch, or -1
    batch["tasks"] = torch.tensor([t for r in rows for t in r.tasks], dtype=torch.int32)
    seen = [(d, g, w + starts[n]) for n, r in enumerate(rows) for d, g, w in r.pictures]
    filmed = [(d, g, w + starts[n]) for n, r in enumerate(rows) for d, g, w in r.films]
    if seen:
        batch["still_patches"] = torch.from_numpy(np.concatenate([d for d, _, _ in seen]))
    if filmed:
        batch["film_patches"] = torch.from_numpy(np.concatenate([d for d, _, _ in filmed]))
    if seen or filmed:
        batch |= _pack_vision(seen + filmed)
    heard = [(d, w + starts[n]) for n, r in enumerate(rows) for d, w in r.sounds]
    if heard:
        longest = max(len(d) for d, _ in heard)
        longest = -(-longest // bp.HOP) * bp.HOP + bp.N_FFT
        waves = np.zeros((len(heard), longest), np.int16)
        for i, (d, _) in enumerate(heard):
            waves[i, : len(d)] = (d * 32767).clip(-32768, 32767)
        batch["waves"] = torch.from_numpy(waves)
        batch["wave_len"] = torch.tensor([len(d) for d, _ in heard], dtype=torch.int32)
        batch["heard_at"] = torch.from_numpy(np.concatenate([w for _, w in heard]).astype(np.int32))
    return batch


def _pack_vision(items: list[tuple[np.ndarray, tuple[int, int, int], np.ndarray]]) -> dict[str, torch.Tensor]:
    """Window order, lengths and patch positions of all pictures, then of all films."""
    order, windows, frames, places, offset = [], [], [], [], 0
    for _, grid, _ in items:
        index, sizes = window_order(grid)
        order.append(index + offset)
        offset += len(index)
        windows.append(sizes)
        frames += [grid[1] * grid[2]] * grid[0]
        places.append(patch_places(grid))
    return {
        "window_order": torch.from_numpy(np.concatenate(order).astype(np.int32)),
        "window_ends": _lengths(np.concatenate(windows)),
        "frame_ends": _lengths(frames),
        "frame_longest": torch.tensor(max(frames)),
        "patch_places": torch.from_numpy(np.concatenate(places)),
        "seen_at": torch.from_numpy(np.concatenate([w for _, _, w in items]).astype(np.int32)),
    }
