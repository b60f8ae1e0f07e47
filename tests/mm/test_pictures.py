"""Processors of families that read pictures only, against transformers: pixels, tiles, and the tokens of a slot."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mm.item import MediaItem, MediaOptions
from mm.processors.anyres import AnyRes, arranged, best_resolution
from mm.processors.gemma import Gemma3, PaliGemma
from mm.processors.gemma4 import Gemma4
from mm.processors.hunyuan_vl import HunYuanVL
from mm.processors.idefics3 import Idefics3
from mm.processors.internvl import InternVL, canvas
from mm.processors.llava import Llava
from mm.processors.naflex import NaflexPictures
from mm.processors.onevision import OneVision
from mm.processors.pictures import Pictures
from mm.processors.pixtral import Pixtral
from mm.transform.image import Scale
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


def idefics3(folder: Path):
    settings = {"size": {"longest_edge": 140}, "max_image_size": {"longest_edge": 56}}
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    return processor(folder, Idefics3, {**settings, **half}, "idefics3"), Idefics3ImageProcessorPil(**settings)


def gemma3(folder: Path):
    settings = {"size": {"height": 56, "width": 56}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 2}
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    marks = {"boi_token_index": 7, "eoi_token_index": 8, "mm_tokens_per_image": 4}
    return processor(folder, Gemma3, settings, "siglip_vision_model", **marks), Gemma3ImageProcessorPil(**settings)


def anyres(folder: Path):
    points = [[56, 112], [112, 56], [112, 112], [168, 56]]
    settings = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}, "image_grid_pinpoints": points}
    from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

    return processor(folder, AnyRes, settings, "clip_vision_model"), LlavaNextImageProcessorPil(**settings)


@pytest.mark.parametrize(("height", "width"), SIZES)
@pytest.mark.parametrize("make", [llava, siglip, pixtral, internvl, idefics3, anyres, gemma3])
def test_pixels_equal_the_reference(tmp_path: Path, make, height: int, width: int) -> None:
    ours, reference = make(tmp_path)
    pixels, item = processed(ours, height, width)
    want = reference(images=[pixels], return_tensors="np", input_data_format="channels_last")["pixel_values"]
    want = want[0] if want.ndim == 5 else want
    got = pixels_of(item.parts[0].features)
    assert got.shape == want.shape
    assert np.abs(got - want).max() < 1e-5  # equal up to rounding


@pytest.mark.parametrize(("height", "width"), [*SIZES, (2000, 20), (15, 3000)])
def test_patches_of_gemma4_equal_the_reference(tmp_path: Path, height: int, width: int) -> None:
    """The colours of a pixel are adjacent in transformers' patches; the tower reorders ours."""
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    ours = processor(tmp_path, Gemma4, {"max_soft_tokens": 70}, "gemma4_vision", boi_token_id=7, eoi_token_id=8)
    pixels, item = processed(ours, height, width)
    reference = Gemma4ImageProcessorPil(max_soft_tokens=70, patch_size=14)
    want = reference(images=[pixels], return_tensors="np", input_data_format="channels_last")
    features, (rows, columns) = item.parts[0].features, item.parts[0].features["grid"]
    count = rows * columns
    got = features["pixel_values"].reshape(count, 3, 14, 14).transpose(0, 2, 3, 1).reshape(count, -1)
    assert np.abs(got - want["pixel_values"][0, :count]).max() < 1e-5
    assert want["image_position_ids"][0, count - 1].tolist() == [columns - 1, rows - 1]
    assert item.parts[0].num_tokens == want["num_soft_tokens_per_image"][0]
    filling = ours.fill(item)
    assert filling.token_ids.tolist() == [7, *[IMAGE] * item.parts[0].num_tokens, 8]


@pytest.mark.parametrize("first", [*SIZES, (700, 9), (5, 400)])
def test_several_pictures_of_onevision_have_one_tile_each(tmp_path: Path, first: tuple[int, int]) -> None:
    """Each picture has one tile, padded to a square; a single picture of the same processor has several tiles."""
    from transformers import LlavaOnevisionProcessor
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil

    settings = {"size": {"height": 56, "width": 56}, "image_mean": [0.5, 0.2, 0.1], "resample": 3}
    settings["image_grid_pinpoints"] = [[56, 112], [112, 112]]
    ours = processor(tmp_path, OneVision, settings, "siglip_vision_model", video_token_id=10)
    pixels, two = [made.noise(*first), made.noise(70, 100, 1)], MediaOptions(num_pictures=2)
    made_of = [ours.process(MediaItem("image", each, scale=Scale(56, 56)), bytes(16), two) for each in pixels]
    want = LlavaOnevisionImageProcessorPil(**settings)(images=[pixels], return_tensors="np")
    got = np.stack([pixels_of(item.parts[0].features) for item in made_of])
    assert got.shape == want["pixel_values"].shape
    assert np.abs(got - want["pixel_values"]).max() < 1e-5  # equal up to rounding
    theirs = SimpleNamespace(num_image_tokens=16, image_token="i", vision_feature_select_strategy="full")
    text = LlavaOnevisionProcessor.replace_image_token(theirs, want, 0)
    assert ours.fill(made_of[0]).token_ids.tolist() == [IMAGE] * len(text) == [IMAGE] * 17
    assert ours.settings("image", two) != ours.settings("image", PLAIN)
    assert ours.settings("video", two) == ours.settings("video", PLAIN)


@pytest.mark.parametrize(("height", "width"), [*SIZES, (200, 20), (15, 300)])
def test_patches_and_tokens_of_hunyuan_vl_equal_the_reference(tmp_path: Path, height: int, width: int) -> None:
    """The bicubic filter scales the picture whatever filter the file names, as in the makers' code."""
    from transformers.models.hunyuan_vl.image_processing_pil_hunyuan_vl import HunYuanVLImageProcessorPil
    from transformers.models.hunyuan_vl.processing_hunyuan_vl import HunYuanVLProcessor

    settings = {"min_pixels": 56**2, "max_pixels": 168**2, "patch_size": 14, "merge_size": 2, "resample": 1}
    ours = processor(tmp_path, HunYuanVL, settings, "hunyuan_vl_vision", rope_scaling={"xdrope_section": [1] * 4})
    pixels, item = processed(ours, height, width)
    reference = HunYuanVLImageProcessorPil(**settings)
    want = reference(images=[pixels], return_tensors="np", input_data_format="channels_last")
    features = item.parts[0].features
    assert features["grid_thw"].tolist() == want["image_grid_thw"].tolist()
    assert np.abs(features["pixel_values"] - want["pixel_values"]).max() < 1e-5
    around = SimpleNamespace(image_processor=reference, image_token="I", cat_extra_token=True)
    written = HunYuanVLProcessor.replace_image_token(around, want, 0)
    assert ours.fill(item).token_ids.tolist() == [IMAGE] * len(written)


@pytest.mark.parametrize(("height", "width"), [*SIZES, (200, 20), (15, 300)])
def test_patches_of_naflex_equal_the_reference(tmp_path: Path, height: int, width: int) -> None:
    from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

    settings = {"patch_size": 14, "max_num_patches": 30}
    ours = processor(tmp_path, NaflexPictures, settings, "siglip2_vision_model")
    pixels, item = processed(ours, height, width)
    want = Siglip2ImageProcessorPil(**settings)(images=[pixels], return_tensors="np", input_data_format="channels_last")
    (part,) = item.parts
    assert part.features["grid"].tolist() == want["spatial_shapes"][0].tolist()
    seen = want["pixel_values"][0][: want["pixel_attention_mask"].sum()]
    assert np.abs(part.features["pixel_values"] - seen).max() < 1e-5
    assert part.num_tokens == 1
    fewer = ours.plan_image(height, width, MediaOptions(max_pixels=10 * 14**2))
    assert fewer.pixels <= 10 * 14**2 < ours.plan_image(height, width, PLAIN).pixels


def test_sizes_of_naflex_are_those_of_the_reference(tmp_path: Path) -> None:
    from transformers.models.siglip2.image_processing_pil_siglip2 import get_image_size_for_max_num_patches

    ours = processor(tmp_path, NaflexPictures, {"max_num_patches": 256}, "siglip2_vision_model")
    for height, width in np.random.default_rng(0).integers(1, 4000, (200, 2)).tolist():
        scale = ours.plan_image(height, width, PLAIN)
        assert (scale.height, scale.width) == get_image_size_for_max_num_patches(height, width, ours.patch, 256)


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


@pytest.mark.parametrize(("height", "width"), [(56, 56), (100, 140), (30, 140)])
def test_tiles_of_idefics_are_named(tmp_path: Path, height: int, width: int) -> None:
    from transformers import Idefics3Processor

    ours, _ = idefics3(tmp_path)
    ours.encode = lambda text: [ord(letter) for letter in text]
    _, item = processed(ours, height, width)
    rows, columns = item.parts[0].features["tiles"].tolist()
    theirs = SimpleNamespace(fake_image_token="<fake_token_around_image>", global_image_tag="<global-img>")
    theirs.image_token, theirs.image_seq_len = chr(IMAGE), 4
    inputs = {"rows": [[rows]], "cols": [[columns]]}
    want = Idefics3Processor.replace_image_token(theirs, inputs, 0)
    filling = ours.fill(item)
    assert "".join(map(chr, filling.token_ids)) == want
    assert all((filling.token_ids[start : start + count] == IMAGE).all() for start, count in filling.runs[0])
    assert sum(count for _, count in filling.runs[0]) == item.parts[0].num_tokens


def test_pictures_of_gemma_stand_between_marks_of_their_own(tmp_path: Path) -> None:
    """The tokens are Gemma3Processor's text without outer newlines, which the renderer joins to the text around."""
    from transformers import Gemma3Processor

    ours, _ = gemma3(tmp_path)
    _, item = processed(ours, 90, 40)
    filling = ours.fill(item)
    letters = "".join(map(chr, filling.token_ids))
    theirs = SimpleNamespace(full_image_sequence=f"\n\n{chr(7)}{chr(IMAGE) * 4}{chr(8)}\n\n")
    assert f"\n\n{letters}\n\n" == Gemma3Processor.replace_image_token(theirs, {"num_crops": [0]}, 0)
    assert (ours.placeholder("image"), filling.runs) == (7, (((1, 4),),))
    assert ours.media_token_ids == {7, IMAGE}


def cropping(folder: Path, **more):
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    cuts = {
        "pan_and_scan_min_crop_size": 40,
        "pan_and_scan_max_num_crops": 3,
        "pan_and_scan_min_ratio_to_activate": 1.2,
    }
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    settings = {"size": {"height": 56, "width": 56}, "resample": 2, **half, **cuts, **more}
    ours = processor(folder, Gemma3, settings, "siglip_vision_model", mm_tokens_per_image=4)
    return ours, Gemma3ImageProcessorPil(**{**settings, "do_pan_and_scan": True})


@pytest.mark.parametrize("told", ["file", "option"])
@pytest.mark.parametrize(
    ("height", "width", "crops"), [(90, 100, 0), (90, 300, 3), (131, 90, 2), (39, 90, 0), (56, 56, 0)]
)
def test_crops_of_gemma_equal_the_reference(tmp_path: Path, height: int, width: int, crops: int, told: str) -> None:
    from transformers import Gemma3Processor

    ours, reference = cropping(tmp_path, do_pan_and_scan=told == "file")
    ours.encode = lambda text: [ord(letter) for letter in text]
    pixels, options = made.noise(height, width), MediaOptions(do_pan_and_scan=told == "option")
    scaled = ours.plan_image(height, width, options).array(pixels)
    item = ours.process(MediaItem("image", scaled), bytes(16), options)
    want = reference(images=[pixels], return_tensors="np", input_data_format="channels_last")
    assert want["num_crops"].tolist() == [crops]
    assert np.abs(pixels_of(item.parts[0].features) - want["pixel_values"]).max() < 1e-5  # equal up to rounding
    filling = ours.fill(item)
    mark = chr(255_999) + 4 * chr(IMAGE) + chr(256_000)
    theirs = SimpleNamespace(full_image_sequence=f"\n\n{mark}\n\n")
    text = Gemma3Processor.replace_image_token(theirs, want, 0)
    assert f"{item.preamble}\n\n{''.join(map(chr, filling.token_ids))}\n\n" == text
    assert [filling.token_ids[start : start + count].tolist() for start, count in filling.runs[0]] == (crops + 1) * [
        4 * [IMAGE]
    ]
    assert len(scaled) * len(scaled[0]) * 3 * 8 < ours.cost("image", scaled.nbytes)


def test_which_pictures_of_gemma_have_crops_is_as_in_the_reference(tmp_path: Path) -> None:
    ours, reference = cropping(tmp_path)
    draw, numbers = random.Random(0), (40, 3, 1.2)
    for _ in range(300):
        height, width = draw.randint(10, 400), draw.randint(10, 400)
        blank = np.zeros((height, width), np.uint8)
        boxes = ours.boxes(height, width, MediaOptions(do_pan_and_scan=True))
        assert [blank[box].shape for box in boxes] == [
            crop.shape[1:] for crop in reference.pan_and_scan(blank[None].repeat(3, 0), *numbers)
        ]
        assert not ours.boxes(height, width, PLAIN)


def test_settings_of_crops_that_make_none_are_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="sizes of at least 1 and a ratio above 1 are needed"):
        cropping(tmp_path, pan_and_scan_min_ratio_to_activate=1.0)
    with pytest.raises(ValueError, match="size needs height and width"):
        processor(tmp_path, PaliGemma, {"size": {"shortest_edge": 56}}, "siglip_vision_model")


def test_a_picture_of_paligemma_has_the_side_of_its_class(tmp_path: Path) -> None:
    """The vision_config of paligemma-3b-pt-224 does not name the side of its pictures."""
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"size": {"height": 224, "width": 224}}))
    ours = PaliGemma(tmp_path, {"vision_config": {"model_type": "siglip_vision_model", "patch_size": 14}})
    _, item = processed(ours, 90, 40)
    assert len(ours.fill(item).token_ids) == item.parts[0].num_tokens == 256


def test_tiles_equal_the_reference() -> None:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas

    draw = random.Random(0)
    for _ in range(500):
        height, width = draw.randint(10, 3000), draw.randint(10, 3000)
        most = draw.choice((2, 6, 12))
        assert canvas(height, width, 448, 1, most) == get_optimal_tiled_canvas((height, width), (448, 448), 1, most)


def test_pictures_that_do_not_fit_the_tower_are_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="images become 28 x 28 pixels; the tower reads 56 x 56"):
        processor(tmp_path, Llava, {"size": {"height": 28, "width": 28}}, "siglip_vision_model")
    with pytest.raises(ValueError, match="the tower reads tiles of 56 x 56"):
        processor(tmp_path, InternVL, {"size": {"height": 28, "width": 28}}, "internvl_vision")


@pytest.mark.parametrize("make", [pixtral, internvl, idefics3, anyres])
def test_a_request_may_lower_the_pixels(tmp_path: Path, make) -> None:
    ours, _ = make(tmp_path)
    lowered = MediaOptions(max_pixels=56 * 112)
    counts = []
    for options in (PLAIN, lowered):
        pixels = made.noise(200, 190)
        scale = ours.plan_image(200, 190, options)
        item = MediaItem("image", pixels if ours.picture_bytes else scale.array(pixels), scale=scale)
        counts.append(ours.process(item, bytes(16), options).parts[0].num_tokens)
    assert counts[1] < counts[0]
    assert ours.settings("image", PLAIN) != ours.settings("image", lowered)


def test_settings_differ_between_processors(tmp_path: Path) -> None:
    told = {make(tmp_path)[0].settings("image", PLAIN) for make in (llava, siglip, pixtral, internvl)}
    assert len(told) == 4


@pytest.mark.parametrize("most", [0, 2, 9])
def test_rows_of_tiles_are_as_many_as_in_the_reference(most: int) -> None:
    from transformers import LlavaNextProcessor, LlavaOnevisionProcessor
    from transformers.image_processing_utils import select_best_resolution

    kind = LlavaOnevisionProcessor if most else LlavaNextProcessor
    points = tuple((384 * rows, 384 * columns) for rows in range(1, 7) for columns in range(1, 7))
    theirs = SimpleNamespace(
        image_processor=SimpleNamespace(image_grid_pinpoints=points), num_image_tokens=27**2, patch_size=14,
        vision_aspect_ratio=f"anyres_max_{most}", num_additional_image_tokens=0,
    )  # fmt: skip
    theirs._get_unpadded_features = kind._get_unpadded_features.__get__(theirs)
    draw = random.Random(most)
    for _ in range(300):
        size = draw.randint(10, 3000), draw.randint(10, 3000)
        best = best_resolution(size, points)
        assert best == select_best_resolution(size, points)
        places, shares = arranged(size, best[0] // 384, best[1] // 384, 27, most)
        assert len(places) == kind._get_number_of_features(theirs, *size, 384, 384)
        assert np.abs(shares.sum(1) - 1).max() < 1e-6
