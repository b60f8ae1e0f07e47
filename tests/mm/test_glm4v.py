"""GLM-4.1V's processor against transformers: sizes, patches, and what is not read."""

import json
import random

import numpy as np
import pytest

from mm.errors import MediaError
from mm.item import MediaItem, MediaOptions
from mm.limits import MediaLimits
from mm.processors.glm4v import Glm4V
from tests.mm import made

PLAIN = MediaOptions()


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


def test_films_are_refused(processor):
    with pytest.raises(MediaError, match="films are not read here"):
        processor.plan_film(8, 2.0, 64, 64, PLAIN, MediaLimits())
