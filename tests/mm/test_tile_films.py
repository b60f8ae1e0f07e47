"""Films of InternVL and LLaVA-OneVision against transformers: which frames, their pixels, the tokens of a slot."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import numpy as np
import pytest

from mm.errors import MediaError
from mm.item import MediaItem, MediaOptions
from mm.limits import MediaLimits
from mm.processors.internvl import InternVL
from mm.processors.onevision import OneVision
from tests.mm import made
from tests.mm.reference import cut_out

PLAIN, LIMITS = MediaOptions(), MediaLimits()
IMAGE, FILM = 9, 10
SIDE = {"size": {"height": 56, "width": 56}}
VISION = {"model_type": "siglip_vision_model", "patch_size": 14, "image_size": 56}


def encode(text: str) -> list[int]:
    return [FILM] if text == "<video>" else list(text.encode())


def internvl(folder, **video) -> InternVL:
    (folder / "preprocessor_config.json").write_text(json.dumps(SIDE))
    (folder / "video_preprocessor_config.json").write_text(json.dumps({"resample": 3, **video}))
    return InternVL(folder, {"vision_config": VISION, "image_token_id": IMAGE}, encode=encode)


def onevision(folder, **video) -> OneVision:
    (folder / "preprocessor_config.json").write_text(json.dumps(SIDE))
    (folder / "video_preprocessor_config.json").write_text(json.dumps({"resample": 3, **video}))
    config = {"vision_config": VISION, "image_token_index": IMAGE, "video_token_index": FILM}
    return OneVision(folder, {**config, "image_grid_pinpoints": [[56, 112]]}, encode=encode)


def processed(ours, total=40, fps=10.0, **asked):
    options = MediaOptions(**asked)
    plan = ours.plan_film(total, fps, 70, 90, options, LIMITS)
    frames = np.stack([plan.scale.array(made.noise(70, 90, int(index))) for index in plan.indices])
    return frames, ours.process(MediaItem("video", frames, plan.seconds_per_frame), bytes(16), options)


def test_frames_equal_the_reference(tmp_path) -> None:
    middle = cut_out("models/internvl/video_processing_internvl.py", "sample_frames")
    even = pytest.importorskip("transformers.video_utils").default_sample_indices_fn
    first, second = internvl(tmp_path), onevision(tmp_path)
    draw = random.Random(0)
    for _ in range(300):
        total, fps = draw.randint(8, 3000), draw.choice((10.0, 23.976, 30.0))
        count = draw.randint(1, 8)
        metadata, options = SimpleNamespace(total_num_frames=total, fps=fps), MediaOptions(num_frames=count)
        theirs = SimpleNamespace(num_frames=None, initial_shift=True)
        want = middle(theirs, metadata, num_frames=count)
        assert first.plan_film(total, fps, 9, 9, options, LIMITS).indices.tolist() == want.tolist()
        want = even(metadata, num_frames=count)
        assert second.plan_film(total, fps, 9, 9, options, LIMITS).indices.tolist() == want.tolist()


@pytest.mark.parametrize("make", [internvl, onevision])
def test_frames_are_as_many_as_files_and_requests_say(tmp_path, make) -> None:
    def count(ours, total=300, limits=LIMITS, **asked) -> int:
        return len(ours.plan_film(total, 30.0, 64, 64, MediaOptions(**asked), limits).indices)

    usual = make(tmp_path)
    assert (count(usual), count(usual, total=3)) == (usual.usual_frames, 3)
    assert (count(usual, num_frames=5), count(usual, fps=0.4), count(usual, fps=0.01)) == (5, 4, 1)
    assert count(usual, limits=MediaLimits(video_max_frames=2)) == 2
    assert count(usual, limits=MediaLimits(video_max_total_pixels=3 * 56 * 56)) == 3
    assert count(make(tmp_path, num_frames=7)) == 7
    assert count(make(tmp_path, fps=2)) == 20
    told = {usual.settings("video", options) for options in (PLAIN, MediaOptions(fps=1), MediaOptions(num_frames=2))}
    assert len({*told, usual.settings("image", PLAIN)}) == 4


def test_a_film_of_internvl_has_the_tokens_of_the_reference(tmp_path) -> None:
    from transformers import InternVLProcessor

    ours = internvl(tmp_path)
    frames, item = processed(ours, num_frames=3)
    theirs = SimpleNamespace(start_image_token="<img>", end_image_token="</img>", image_token=chr(IMAGE))
    theirs.image_seq_length = 4
    want = InternVLProcessor.replace_video_token(theirs, {"pixel_values_videos": [frames]}, 0)
    filling = ours.fill(item)
    assert "".join(map(chr, filling.token_ids)) == want
    (runs,) = filling.runs
    assert all((filling.token_ids[start : start + count] == IMAGE).all() for start, count in runs)
    assert sum(count for _, count in runs) == item.parts[0].num_tokens == 12
    assert ours.placeholder("video") == FILM


def test_a_film_of_onevision_has_the_tokens_of_the_reference(tmp_path) -> None:
    from transformers import LlavaOnevisionProcessor

    ours = onevision(tmp_path)
    frames, item = processed(ours, num_frames=3)
    theirs = SimpleNamespace(num_image_tokens=16, video_token=chr(FILM))
    want = LlavaOnevisionProcessor.replace_video_token(theirs, {"pixel_values_videos": [frames]}, 0)
    filling = ours.fill(item)
    assert "".join(map(chr, filling.token_ids)) == want
    assert filling.runs == (((0, 13),),)
    features = item.parts[0].features
    assert features["places"].shape == features["shares"].shape == (13, 4)
    assert np.abs(features["shares"].sum(1) - 1).max() < 1e-6


@pytest.mark.parametrize("make", [internvl, onevision])
def test_pixels_are_scaled_and_centred_as_the_film_file_says(tmp_path, make) -> None:
    ours = make(tmp_path, image_mean=[0.5] * 3, image_std=[0.25] * 3)
    frames, item = processed(ours, num_frames=2)
    patches = item.parts[0].features["pixel_values"].reshape(2, 4, 4, 3, 14, 14)
    pixels = patches.transpose(0, 1, 4, 2, 5, 3).reshape(2, 56, 56, 3)
    assert np.abs(pixels - (frames / 255 - 0.5) / 0.25).max() < 1e-5


def test_without_a_token_for_films_none_are_read(tmp_path) -> None:
    """As in checkpoints whose tokenizer was written before their processor read films; or without a tokenizer."""
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(SIDE))
    config = {"vision_config": VISION, "image_token_id": IMAGE}
    for ours in (InternVL(tmp_path, config), InternVL(tmp_path, config, encode=lambda text: [1, 2])):
        assert ours.modalities == {"image"}
        with pytest.raises(MediaError, match="does not read films"):
            ours.plan_film(8, 2.0, 64, 64, PLAIN, LIMITS)
