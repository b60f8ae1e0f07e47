"""Processors of families that see pictures only, against transformers: pixels, tiles, and the tokens of a slot."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from mm.item import MediaItem, MediaOptions
from mm.processors.internvl import InternVL, canvas
from mm.processors.llava import Llava
from mm.processors.pictures import Pictures
from mm.processors.pixtral import Pixtral
from tests.mm import made

models = pytest.importorskip("transformers.models")
PLAIN = MediaOptions()
SIZES = [(56, 56), (100, 37), (37, 150), (90, 120), (33, 31), (211, 99)]
IMAGE = 9


def encode(text: str) -> list[int]:
    return [sum(text.encode())]


def processor(folder: Path, kind: type[Pictures], settings: dict, tower: str, **config) -> Pictures:
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    vision = {"model_type": tower, "patch_size": 14, "image_size": 56}
    return kind(folder, {"vision_config": vision, "image_token_id": IMAGE, **config}, encode=encode)


def processed(ours: Pictures, height: int, width: int):
    pixels = made.noise(height, width)
    scale = ours.plan_image(height, width, PLAIN)
    item = MediaItem("image", pixels, scale=scale) if ours.picture_bytes else MediaItem("image", scale.array(pixels))
    return pixels, ours.process(item, bytes(16), PLAIN)


def pixels_of(features: dict[str, np.ndarray]) -> np.ndarray:
    height, width = features["grid"].tolist()
    patches = features["pixel_values"].reshape(-1, height, width, 3, 14, 14)
    return patches.transpose(0, 3, 1, 4, 2, 5).reshape(-1, 3, height * 14, width * 14)


def llava(folder: Path):
    settings = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

    return processor(folder, Llava, settings, "clip_vision_model"), LlavaImageProcessorPil(**settings)


def siglip(folder: Path):
    settings = {"size": {"height": 56, "width": 56}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 3}
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    return processor(folder, Llava, settings, "siglip_vision_model"), SiglipImageProcessorPil(**settings)


def pixtral(folder: Path):
    settings = {"size": {"longest_edge": 140}, "patch_size": {"height": 28, "width": 28}}
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    ours = processor(folder, Pixtral, settings, "pixtral", model_type="mistral3", spatial_merge_size=2)
    return ours, PixtralImageProcessorPil(**settings)


def internvl(folder: Path):
    settings = {"size": {"height": 56, "width": 56}, "crop_to_patches": True, "max_patches": 6}
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    return processor(folder, InternVL, settings, "internvl_vision"), GotOcr2ImageProcessorPil(**settings)


@pytest.mark.parametrize(("height", "width"), SIZES)
@pytest.mark.parametrize("make", [llava, siglip, pixtral, internvl])
def test_pixels_equal_the_reference(tmp_path: Path, make, height: int, width: int) -> None:
    ours, reference = make(tmp_path)
    pixels, item = processed(ours, height, width)
    want = reference(images=[pixels], return_tensors="np", input_data_format="channels_last")["pixel_values"]
    got = pixels_of(item.parts[0].features)
    assert got.shape == want.shape
    assert np.abs(got - want).max() < 2 / 255 / 0.26


def test_rows_of_pixtral_end(tmp_path: Path) -> None:
    ours, _ = pixtral(tmp_path)
    _, item = processed(ours, 60, 90)
    filling = ours.fill(item)
    row, last = encode("[IMG_BREAK]")[0], encode("[IMG_END]")[0]
    assert filling.token_ids.tolist() == [IMAGE] * 4 + [row] + [IMAGE] * 4 + [row] + [IMAGE] * 4 + [last]
    assert filling.runs == (((0, 4), (5, 4), (10, 4)),)
    assert item.parts[0].num_tokens == 12


def test_pictures_of_internvl_stand_between_marks(tmp_path: Path) -> None:
    ours, _ = internvl(tmp_path)
    _, item = processed(ours, 56, 112)
    filling = ours.fill(item)
    assert item.parts[0].num_tokens == 3 * 4
    assert filling.token_ids.tolist() == [*encode("<img>"), *[IMAGE] * 12, *encode("</img>")]
    assert filling.runs == (((1, 12),),)


def test_tiles_equal_the_reference() -> None:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas

    draw = random.Random(0)
    for _ in range(500):
        height, width = draw.randint(10, 3000), draw.randint(10, 3000)
        most = draw.choice((2, 6, 12))
        assert canvas(height, width, 448, 1, most) == get_optimal_tiled_canvas((height, width), (448, 448), 1, most)


def test_pictures_that_do_not_fit_the_tower_are_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pictures become 28 x 28 pixels; the tower reads 56 x 56"):
        processor(tmp_path, Llava, {"size": {"height": 28, "width": 28}}, "siglip_vision_model")
    with pytest.raises(ValueError, match="the tower reads tiles of 56 x 56"):
        processor(tmp_path, InternVL, {"size": {"height": 28, "width": 28}}, "internvl_vision")


def test_settings_tell_one_processor_from_another(tmp_path: Path) -> None:
    told = {make(tmp_path)[0].settings("image", PLAIN) for make in (llava, siglip, pixtral, internvl)}
    assert len(told) == 4
