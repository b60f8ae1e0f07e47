"""Films of InternVL and LLaVA-OneVision against transformers: chosen frames, their pixels, the tokens of a slot."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import numpy as np
import pytest

from mm.errors import MediaError
from mm.item import MediaItem, MediaOptions
from mm.limits import MediaLimits
from mm.processors.gemma4 import Gemma4
from mm.processors.gemma4_sound import Front
from mm.processors.internvl import CONTEXT, InternVL, InternVLChat
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


def internvl_chat(folder) -> InternVLChat:
    (folder / "preprocessor_config.json").write_text(json.dumps(SIDE))
    return InternVLChat(
        folder, {"vision_config": VISION}, encode=lambda text: [IMAGE] if text == CONTEXT else encode(text)
    )


def test_frames_of_internvl_chat_are_those_of_its_model_card(tmp_path) -> None:
    """https://huggingface.co/OpenGVLab/InternVL3-8B: get_index, without a bound; max_num=1, num_segments=8."""

    def get_index(total: int, count: int) -> list[int]:
        size = float(total - 1) / count
        return [int(size / 2 + np.round(size * index)) for index in range(count)]

    ours, draw = internvl_chat(tmp_path), random.Random(1)
    for _ in range(300):
        total, count = draw.randint(8, 3000), draw.randint(1, 8)
        found = ours.plan_film(total, 30.0, 9, 9, MediaOptions(num_frames=count), LIMITS)
        assert found.indices.tolist() == get_index(total, count)
    assert ours.plan_film(300, 30.0, 9, 9, PLAIN, LIMITS).indices.tolist() == get_index(300, 8)


def test_a_film_of_internvl_chat_has_the_tokens_of_its_model_card(tmp_path) -> None:
    """`Frame1: <image>`, a newline, `Frame2: <image>` ...; the newline after the last frame belongs to the text."""
    ours = internvl_chat(tmp_path)
    _, item = processed(ours, num_frames=3)
    text = "\n".join(f"Frame{number}: <img>{chr(IMAGE) * 4}</img>" for number in (1, 2, 3))
    assert "".join(map(chr, ours.fill(item).token_ids)) == text
    assert item.parts[0].features["pixel_values"].shape == (3 * 16, 588)
    assert ours.placeholder("video") == ours.placeholder("image") == IMAGE


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


def gemma4(folder, **config) -> Gemma4:
    (folder / "preprocessor_config.json").write_text(json.dumps({"max_soft_tokens": 280}))
    (folder / "video_preprocessor_config.json").write_text(json.dumps({"max_soft_tokens": 70, "num_frames": 5}))
    marks = {"image_token_id": IMAGE, "video_token_id": FILM, "boi_token_id": 7, "eoi_token_id": 8}
    vision = {"model_type": "gemma4_vision", "patch_size": 16}
    return Gemma4(folder, {"vision_config": vision, **marks, **config}, encode=encode)


@pytest.mark.parametrize(("height", "width"), [(70, 90), (600, 33)])
def test_a_film_of_gemma4_has_the_patches_and_tokens_of_the_reference(tmp_path, height, width) -> None:
    """Each frame follows its minute and second; the first frame's time is in front of the slot."""
    from transformers import Gemma4Processor
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    ours = gemma4(tmp_path)
    plan = ours.plan_film(700, 10.0, height, width, PLAIN, LIMITS)
    kept = [made.noise(height, width, int(index)) for index in plan.indices]
    frames = np.stack([plan.scale.array(frame) for frame in kept])
    item = ours.process(MediaItem("video", frames, plan.seconds_per_frame, plan.seconds), bytes(16), PLAIN)
    reference = Gemma4ImageProcessorPil(max_soft_tokens=70)  # transformers scales and cuts frames as it does pictures
    want = reference(images=kept, return_tensors="np", input_data_format="channels_last")
    features, count = item.parts[0].features, int(item.parts[0].features["grid"].prod())
    patches = features["pixel_values"].reshape(5, count, 3, 16, 16).transpose(0, 1, 3, 4, 2).reshape(5, count, -1)
    assert np.abs(patches - want["pixel_values"][:, :count]).max() < 1e-5
    assert want["num_soft_tokens_per_image"].tolist() == [count // 9] * 5
    metadata = SimpleNamespace(fps=10.0, timestamps=[index / 10.0 for index in plan.indices])
    theirs = SimpleNamespace(boi_token=chr(7), eoi_token=chr(8), video_token=chr(FILM))
    inputs = {"num_soft_tokens_per_video": [count // 9], "video_metadata": [metadata]}
    text = Gemma4Processor.replace_video_token(theirs, inputs, 0)
    assert text.startswith("00:00 ")
    assert " 00:56 " in text
    filling = ours.fill(item)
    assert item.preamble + "".join(map(chr, filling.token_ids)) == text
    assert [length for _, length in filling.runs[0]] == [count // 9] * 5
    assert all((filling.token_ids[start : start + length] == FILM).all() for start, length in filling.runs[0])


def test_a_film_of_gemma4_has_fewer_pixels_or_frames_where_asked(tmp_path) -> None:
    ours = gemma4(tmp_path)
    plans = [
        ours.plan_film(700, 10.0, 90, 90, MediaOptions(**asked), LIMITS)
        for asked in ({}, {"max_pixels": 48 * 48 * 4}, {"num_frames": 2}, {"fps": 0.1})
    ]
    assert [len(plan.indices) for plan in plans] == [5, 5, 2, 7]
    assert [plan.scale.height for plan in plans] == [384, 96, 384, 384]
    told = {ours.settings("video", MediaOptions(**asked)) for asked in ({}, {"max_pixels": 9}, {"fps": 0.1})}
    assert len(told) == 3
    assert all(plan.silent for plan in plans)


def test_gemma4_takes_audio_where_it_has_a_tower_for_sounds(tmp_path) -> None:
    assert gemma4(tmp_path).modalities == gemma4(tmp_path, audio_config=None).modalities == {"image", "video"}
    ours = gemma4(tmp_path, audio_config={}, audio_token_id=11, boa_token_id=12, eoa_token_index=13)
    assert ours.modalities == {"image", "video", "audio"}
    assert (ours.placeholder("audio"), ours.media_token_ids) == (11, {IMAGE, FILM, 11})
    item = ours.process(MediaItem("audio", np.zeros(16000, np.float32)), bytes(16), PLAIN)
    assert ours.fill(item).token_ids.tolist() == [12, *[11] * 25, 13]
    longer = np.zeros(480_001, np.float32)
    with pytest.raises(MediaError, match="the audio is longer than the 30 seconds that this model takes at a time"):
        ours.process(MediaItem("audio", longer), bytes(16), PLAIN)
    assert ours.process(MediaItem("audio", longer[1:]), bytes(16), PLAIN).parts[0].num_tokens == 750
    assert ours.process(MediaItem("audio", longer[:5]), bytes(16), PLAIN).parts[0].num_tokens == 1
    with pytest.raises(ValueError, match="noise is not added to audio items; set it to 0"):
        Front.of({"dither": 0.1})


def test_without_a_token_for_films_none_are_read(tmp_path) -> None:
    """The model reads no films if its tokenizer lacks the token of films, or if there is no tokenizer."""
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(SIDE))
    config = {"vision_config": VISION, "image_token_id": IMAGE}
    for ours in (InternVL(tmp_path, config), InternVL(tmp_path, config, encode=lambda text: [1, 2])):
        assert ours.modalities == {"image"}
        with pytest.raises(MediaError, match="does not read videos"):
            ours.plan_film(8, 2.0, 64, 64, PLAIN, LIMITS)
