"""Qwen3-VL's processor against transformers: chosen frames of a film, their size, their times, the tokens of a slot."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mm.errors import MediaError
from mm.item import MediaItem, MediaOptions
from mm.limits import MediaLimits
from mm.processors.qwen3_vl import Qwen3VL, film_scale
from mm.transform.image import PatchSettings
from tests.mm import made

reference = pytest.importorskip("transformers.models.qwen3_vl.video_processing_qwen3_vl")
PLAIN = MediaOptions()
START, END, FILM = 90, 91, 92
IDS = {"vision_start_token_id": START, "vision_end_token_id": END, "video_token_id": FILM}


def encode(text: str) -> list[int]:
    return list(text.encode())


@pytest.fixture
def processor(tmp_path: Path) -> Qwen3VL:
    return Qwen3VL(tmp_path, IDS, encode=encode)


def test_film_sizes_equal_the_reference() -> None:
    draw = random.Random(0)
    for _ in range(2000):
        count, height, width = draw.randint(2, 700), draw.randint(20, 2000), draw.randint(20, 2000)
        if max(height, width) >= 200 * min(height, width):
            continue
        least, most = draw.randint(1, 40) * 4096, draw.randint(40, 4000) * 4096
        settings = PatchSettings(patch_size=16, min_pixels=least, max_pixels=most)
        got = film_scale(count, height, width, settings)
        assert (got.height, got.width) == reference.smart_resize(count, height, width, 2, 32, least, most)


def test_frames_equal_the_reference(processor: Qwen3VL) -> None:
    rule = SimpleNamespace(fps=2, min_frames=4, max_frames=768)
    draw = random.Random(1)
    for _ in range(200):
        total, fps = draw.randint(1, 3000), draw.choice((10.0, 23.976, 30.0, 60.0))
        if total / fps > 120:
            continue
        want = reference.Qwen3VLVideoProcessor.sample_frames(
            rule, SimpleNamespace(total_num_frames=total, fps=fps), fps=2
        )
        plan = processor.plan_film(total, fps, 90, 120, PLAIN, MediaLimits())
        assert plan.indices.tolist() == want.tolist()


@pytest.mark.parametrize(("total", "fps"), [(30, 10.0), (7, 1.0), (1, 30.0), (211, 23.976)])
def test_a_film_has_the_tokens_of_the_reference(processor: Qwen3VL, total: int, fps: float) -> None:
    from transformers import Qwen3VLProcessor

    plan = processor.plan_film(total, fps, 64, 96, PLAIN, MediaLimits())
    frames = np.stack([plan.scale.array(made.noise(64, 96, int(index))) for index in plan.indices])
    processed = processor.process(MediaItem("video", frames, plan.seconds_per_frame, plan.seconds), bytes(16), PLAIN)
    filling = processor.fill(processed)
    (part,) = processed.parts
    theirs = SimpleNamespace(video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2))
    theirs.vision_start_token, theirs.video_token, theirs.vision_end_token = "Z[", "#", "]"
    theirs._calculate_timestamps = Qwen3VLProcessor._calculate_timestamps.__get__(theirs)
    metadata = SimpleNamespace(fps=fps, frames_indices=plan.indices.copy())
    inputs = {"video_grid_thw": part.features["grid_thw"], "video_metadata": [metadata]}
    want = Qwen3VLProcessor.replace_video_token(theirs, inputs, 0)
    named = {START: "Z[", END: "]", FILM: "#"}
    assert "".join(named.get(token) or chr(token) for token in filling.token_ids.tolist()) == want
    (runs,) = filling.runs
    assert len(runs) == part.features["grid_thw"][0][0]
    assert sum(count for _, count in runs) == part.num_tokens


def test_films_need_a_tokenizer(tmp_path: Path) -> None:
    processor = Qwen3VL(tmp_path, IDS)
    plan = processor.plan_film(8, 2.0, 64, 64, PLAIN, MediaLimits())
    frames = np.zeros((len(plan.indices), plan.scale.height, plan.scale.width, 3), np.uint8)
    processed = processor.process(MediaItem("video", frames, 0.5, plan.seconds), bytes(16), PLAIN)
    with pytest.raises(MediaError, match="the server has no tokenizer"):
        processor.fill(processed)


def test_long_films_get_smaller_frames(processor: Qwen3VL) -> None:
    limits = MediaLimits()
    long = processor.plan_film(30 * 590, 30.0, 1080, 1920, PLAIN, limits)
    assert len(long.indices) == limits.video_max_frames
    assert long.pixels <= 32 * 32 * 768 + 32 * 32 * len(long.indices)
