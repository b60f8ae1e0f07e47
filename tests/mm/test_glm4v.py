"""GLM-4.1V's processor against transformers: sizes, patches, the chosen frames of a film, and their seconds."""

import json
import random
from types import SimpleNamespace

import numpy as np
import pytest

from mm.item import MediaItem, MediaOptions
from mm.limits import MediaLimits
from mm.processors.glm4v import Glm4V
from tests.mm import made
from tests.mm.reference import cut_out

PLAIN = MediaOptions()
FREE = MediaLimits(video_max_frames=4096)
MARKS = {"image_start_token_id": ord("["), "image_end_token_id": ord("]")}


@pytest.fixture
def processor(tmp_path):
    settings = {"size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 60}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    return Glm4V(tmp_path, {"image_token_id": 9, "video_token_id": 10})


@pytest.mark.parametrize(("height", "width"), [(56, 56), (20, 300), (211, 99), (400, 500)])
def test_patches_equal_the_reference(processor, height, width):
    kind = pytest.importorskip("transformers.models.glm4v.image_processing_pil_glm4v").Glm4vImageProcessorPil
    theirs = kind(size={"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 60})
    pixels = made.noise(height, width)
    want = theirs(images=[pixels], return_tensors="np", input_data_format="channels_last")
    item = MediaItem("image", processor.plan_image(height, width, PLAIN).array(pixels))
    (part,) = processor.process(item, bytes(16), PLAIN).parts
    assert part.features["grid_thw"].tolist() == want["image_grid_thw"].tolist()
    assert np.abs(part.features["pixel_values"] - want["pixel_values"]).max() < 1e-5
    filling = processor.fill(processor.process(item, bytes(16), PLAIN))
    assert filling.token_ids.tolist() == [9] * (len(part.features["pixel_values"]) // 4)


def test_sizes_equal_the_reference(processor):
    theirs = pytest.importorskip("transformers.models.glm4v.image_processing_pil_glm4v").smart_resize
    draw = random.Random(0)
    for _ in range(500):
        height, width = draw.randint(10, 2000), draw.randint(10, 2000)
        scale = processor.plan_image(height, width, PLAIN)
        assert (scale.height, scale.width) == theirs(2, height, width, 2, 28, 112 * 112, 28 * 28 * 60)


@pytest.mark.parametrize(("dynamic", "module"), [(False, "glm4v"), (True, "glm46v")])
def test_frames_equal_the_reference(tmp_path, dynamic, module):
    """transformers repeats the last frame of an odd number of frames here; we repeat it when patches are made."""
    sample_frames = cut_out(f"models/{module}/video_processing_{module}.py", "sample_frames")
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"processor_class": "Glm46VProcessor"} if dynamic else {})
    )
    ours = Glm4V(tmp_path, {})
    draw = random.Random(1)
    theirs = SimpleNamespace(fps=2, max_duration=300, temporal_patch_size=2)
    for _ in range(60):
        total, fps = draw.randint(1, 9000), draw.choice((1.0, 10.0, 23.976, 30.0))
        want = sample_frames(theirs, SimpleNamespace(total_num_frames=total, fps=fps, duration=total / fps))
        plan = ours.plan_film(total, fps, 64, 96, PLAIN, FREE)
        assert plan.indices.tolist() == sorted(set(want.tolist())), (total, fps)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("total", "fps"), [(30, 10.0), (7, 1.0), (1, 30.0), (211, 23.976)])
def test_a_film_has_the_tokens_of_the_reference(tmp_path, total, fps, dynamic):
    from transformers import Glm4vProcessor, Glm46VProcessor

    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"processor_class": "Glm46VProcessor"} if dynamic else {})
    )
    kind = Glm46VProcessor if dynamic else Glm4vProcessor
    ours = Glm4V(tmp_path, {**MARKS, "image_token_id": 9}, encode=lambda text: list(text.encode()))
    plan = ours.plan_film(total, fps, 64, 96, PLAIN, FREE)
    frames = np.stack([plan.scale.array(made.noise(64, 96, int(index))) for index in plan.indices])
    processed = ours.process(MediaItem("video", frames, plan.seconds_per_frame, plan.seconds), bytes(16), PLAIN)
    (part,) = processed.parts
    theirs = SimpleNamespace(video_processor=SimpleNamespace(merge_size=2), image_token="#")
    theirs.replace_frame_token_id = kind.replace_frame_token_id.__get__(theirs)
    shown = SimpleNamespace(fps=fps, timestamps=[index / fps for index in plan.indices])
    inputs = {"video_grid_thw": part.features["grid_thw"], "video_metadata": [shown]}
    want = kind.replace_video_token(theirs, inputs, 0)
    want = want.replace("<|begin_of_image|>", "[").replace("<|end_of_image|>", "]")
    filling = ours.fill(processed)
    assert "".join({9: "#"}.get(token) or chr(token) for token in filling.token_ids.tolist()) == want
    (runs,) = filling.runs
    assert sum(count for _, count in runs) == part.num_tokens


def test_a_request_may_lower_frames_and_the_server_bounds_them(processor):
    counts = [
        len(processor.plan_film(300, 30.0, 64, 64, options, limits).indices)
        for options, limits in (
            (PLAIN, FREE),
            (MediaOptions(num_frames=5), FREE),
            (MediaOptions(fps=0.5), FREE),
            (PLAIN, MediaLimits(video_max_frames=8)),
        )
    ]
    assert counts == [20, 5, 5, 8]
