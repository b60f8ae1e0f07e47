"""A sample in transformers' form: keyword arguments for the thinker's own `forward` and `generate`.

Used by the tests (packed training pass against transformers) and by offline evaluation.
"""

from __future__ import annotations

import numpy as np
import torch

from examples.embedded_model import blueprint as bp
from examples.embedded_model.encode import Encoder, Row
from examples.embedded_model.sample import Sample


def _pixels(data: np.ndarray) -> torch.Tensor:
    """Normalised float patches [patches, 1176] of uint8 patches; stills are doubled along time."""
    depth = data.shape[1] // (3 * bp.PATCH**2)
    pixels = torch.from_numpy(data).view(-1, 3, depth, bp.PATCH**2).float() / 255
    mean, std = (torch.tensor(v)[:, None, None] for v in (bp.IMAGE_MEAN, bp.IMAGE_STD))
    pixels = (pixels - mean) / std
    return pixels.expand(-1, 3, 2, -1).reshape(len(data), -1)


def arguments(row: Row, extractor, use_audio_in_video: bool = False) -> dict:
    """Keyword arguments of one sequence, as a batch of one."""
    out: dict = {"input_ids": torch.tensor([row.ids]), "attention_mask": torch.ones(1, len(row.ids), dtype=torch.long)}
    if row.pictures:
        out["pixel_values"] = torch.cat([_pixels(d) for d, _, _ in row.pictures])
        out["image_grid_thw"] = torch.tensor([g for _, g, _ in row.pictures])
    if row.films:
        out["pixel_values_videos"] = torch.cat([_pixels(d) for d, _, _ in row.films])
        out["video_grid_thw"] = torch.tensor([g for _, g, _ in row.films])
        out["video_second_per_grid"] = torch.full((len(row.films),), 2 / bp.VIDEO_FPS)
    if row.sounds:
        heard = extractor(
            [d for d, _ in row.sounds],
            sampling_rate=bp.SAMPLE_RATE,
            padding="max_length",
            return_attention_mask=True,
            return_tensors="pt",
        )
        out["input_features"] = heard["input_features"]
        out["feature_attention_mask"] = heard["attention_mask"]
    if use_audio_in_video:
        out["use_audio_in_video"] = True
    return out


def prompt(encoder: Encoder, sample: Sample) -> Row:
    """The conversation as arrays, without its last answer."""
    row = encoder.row(sample)
    answer = row.turn_of.count(len(sample.turns) - 1)
    row.ids, row.labels = row.ids[:-answer], row.labels[:-answer]
    return row
