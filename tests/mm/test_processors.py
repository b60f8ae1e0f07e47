"""Processors against transformers: pixels, mels, grids and counts; checkpoint files of every age (R8)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mm.item import MediaItem, MediaOptions
from mm.limits import MediaLimits
from mm.processors.base import Processor, read_processor_files
from mm.processors.qwen_omni import QwenOmni
from mm.processors.qwen_vl import QwenVL
from mm.processors.registry import processor_for
from mm.transform.image import PatchSettings, Scale, patchify, smart_resize
from mm.transform.mel import MelSettings, log_mel, mel_filters
from tests.mm import made

EMBEDDED = Path(__file__).parents[2] / "server" / "embedded"
PLAIN, LIMITS = MediaOptions(), MediaLimits()
DIGEST = bytes(16)
SIZES = [(56, 56), (100, 37), (37, 400), (480, 640), (31, 33), (720, 405), (28, 28 * 60)]


@pytest.fixture(scope="module")
def embedded() -> Processor:
    processor = processor_for("qwen_omni:QwenOmni", EMBEDDED, json.loads((EMBEDDED / "config.json").read_text()))
    assert isinstance(processor, QwenOmni)
    return processor


def flat_embedded() -> dict:
    return json.loads((EMBEDDED / "preprocessor_config.json").read_text())


def photo(height: int, width: int) -> np.ndarray:
    """A picture with smooth and with noisy parts, so that resampling changes it."""
    rows, columns = np.mgrid[0:height, 0:width]
    smooth = np.stack([rows * 255 / height, columns * 255 / width, (rows + columns) % 256], -1)
    return ((smooth + made.noise(height, width)) / 2).astype(np.uint8)


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_pictures_equal_the_reference(embedded: Processor, height: int, width: int) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    keys = ("min_pixels", "max_pixels", "patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std")
    reference = Qwen2VLImageProcessorPil(**{key: flat_embedded()[key] for key in keys})
    pixels = photo(height, width)
    expected = reference(images=[pixels], return_tensors="np", input_data_format="channels_last")
    scaled = embedded.plan_image(height, width, PLAIN).array(pixels)
    (part,) = embedded.process(MediaItem("image", scaled), DIGEST, PLAIN).parts
    np.testing.assert_array_equal(part.features["grid_thw"], expected["image_grid_thw"])
    assert np.abs(part.features["pixel_values"] - expected["pixel_values"]).max() < 1e-5  # equal up to rounding
    assert part.num_tokens == int(expected["image_grid_thw"].prod()) // 4


@pytest.mark.parametrize("samples", [160, 161, 400, 1000, 16000, 48000, 479_590, 479_601, 479_850, 479_999, 480_000])
@pytest.mark.parametrize("mels", [80, 128])
def test_mels_equal_the_reference(samples: int, mels: int) -> None:
    from transformers import WhisperFeatureExtractor

    rng = np.random.default_rng(samples)
    sound = (rng.standard_normal(samples) * np.linspace(0, 0.3, samples)).astype(np.float32)
    reference = WhisperFeatureExtractor(feature_size=mels)
    expected = reference(sound, sampling_rate=16000, return_attention_mask=True, return_tensors="np")
    valid = int(expected["attention_mask"].sum())
    out = log_mel(sound, MelSettings(num_mels=mels))
    assert out.shape == (mels, valid)
    assert np.abs(out - expected["input_features"][0][:, :valid]).max() < 1e-4
    assert np.abs(mel_filters(MelSettings(num_mels=mels)).T - reference.mel_filters).max() < 1e-9


@pytest.mark.parametrize("kind", ["sine", "silence", "click", "loud"])
def test_mels_of_unlike_sounds_equal_the_reference(kind: str) -> None:
    from transformers import WhisperFeatureExtractor

    sound = {
        "sine": np.sin(np.arange(32000) * 0.3) * 0.5,
        "silence": np.zeros(32000),
        "click": np.eye(1, 32000, 31990)[0],
        "loud": np.sign(np.sin(np.arange(32000) * 0.01)),
    }[kind].astype(np.float32)
    expected = WhisperFeatureExtractor()(sound, sampling_rate=16000, return_tensors="np")["input_features"][0][:, :200]
    assert np.abs(log_mel(sound, MelSettings(num_mels=80)) - expected).max() < 1e-3


def test_sound_counts_follow_the_tower(embedded: Processor) -> None:
    for samples in (1, 160, 480, 481, 16000, 47999, 48000):
        (part,) = embedded.process(MediaItem("audio", np.zeros(samples, np.float32)), DIGEST, PLAIN).parts
        frames = part.features["input_features"].shape[1]
        assert frames == max(3, -(-samples // 160))
        assert part.num_tokens == ((frames - 1) // 2 + 1 - 2) // 2 + 1 >= 1


def test_sound_beyond_the_extractors_window_is_not_cut(embedded: Processor) -> None:
    (part,) = embedded.process(MediaItem("audio", np.zeros(16000 * 40, np.float32)), DIGEST, PLAIN).parts
    assert part.features["input_features"].shape == (80, 4000)


def test_films_have_the_patch_order_of_the_reference() -> None:
    frames = made.noise(5 * 56, 84).reshape(5, 56, 84, 3)
    settings = PatchSettings()
    patches, grid = patchify(frames, settings)
    assert grid == (3, 4, 6)
    padded = np.concatenate([frames, frames[-1:]]).transpose(0, 3, 1, 2) / 255  # [6, 3, 56, 84]
    mean, std = np.array(settings.mean)[:, None, None], np.array(settings.std)[:, None, None]
    normal = (padded - mean) / std
    view = normal.reshape(3, 2, 3, 2, 2, 14, 3, 2, 14).transpose(0, 3, 6, 4, 7, 2, 1, 5, 8)
    assert np.abs(patches - view.reshape(3 * 4 * 6, -1)).max() < 1e-6


def test_a_still_picture_is_two_equal_frames() -> None:
    pixels = made.noise(28, 28)
    still, _ = patchify(pixels[None], PatchSettings())
    moving, _ = patchify(np.stack([pixels, pixels]), PatchSettings())
    np.testing.assert_array_equal(still, moving)


def test_sizes_follow_the_reference_and_its_bounds() -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as reference

    rng = np.random.default_rng(0)
    for _ in range(2000):
        height, width = (int(side) for side in rng.integers(2, 3000, 2))
        if max(height, width) / min(height, width) > 200:
            continue
        bounds = (28, int(rng.integers(1, 40)) * 784, int(rng.integers(40, 2000)) * 784)
        assert smart_resize(height, width, *bounds) == reference(height, width, *bounds)


def test_devices_that_make_patches_get_pixels(tmp_path: Path) -> None:
    vl = QwenVL(tmp_path, {"model_type": "qwen2_5_vl"}, picture_bytes=1 << 20)
    host = QwenVL(tmp_path, {"model_type": "qwen2_5_vl"})
    assert (vl.picture_bytes, host.picture_bytes) == (1 << 20, 0)
    pixels = photo(100, 70)
    scale = vl.plan_image(100, 70, PLAIN)
    (part,) = vl.process(MediaItem("image", pixels, scale=scale), DIGEST, PLAIN).parts
    (wanted,) = host.process(MediaItem("image", scale.array(pixels)), DIGEST, PLAIN).parts
    features = part.features
    assert np.shares_memory(features["pixels"], pixels)
    assert features["pixels"].shape == (1, 100, 70, 3)
    assert [features[name].shape[1] for name in ("rows", "columns")] == [scale.height, scale.width]
    assert "pixel_values" not in features
    np.testing.assert_array_equal(features["grid_thw"], wanted.features["grid_thw"])
    assert part.num_tokens == wanted.num_tokens
    film = MediaItem("video", made.noise(4 * 56, 84).reshape(4, 56, 84, 3), 0.5)
    (seen,), (known,) = vl.process(film, DIGEST, PLAIN).parts, host.process(film, DIGEST, PLAIN).parts
    assert seen.features["pixels"].shape == (4, 56, 84, 3)
    assert seen.num_tokens == known.num_tokens
    assert seen.features["second_per_grid"] == known.features["second_per_grid"]
    assert vl.cost("image", 3 << 20) < host.cost("image", 3 << 20)


def test_other_filters_than_bicubic_stay_on_the_host(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text('{"resample": 2}')
    assert QwenVL(tmp_path, {"model_type": "qwen2_5_vl"}, picture_bytes=1 << 20).picture_bytes == 0


def test_resize_leaves_fitting_pictures_alone() -> None:
    pixels = made.noise(56, 56)
    assert Scale(56, 56).array(pixels) is pixels


def test_the_embedded_model_reads_all_three(embedded: Processor) -> None:
    config = json.loads((EMBEDDED / "config.json").read_text())
    assert embedded.modalities == {"image", "audio", "video"}
    for modality in ("image", "audio", "video"):
        assert embedded.placeholder(modality) == config[f"{modality}_token_index"]
    assert embedded.media_token_ids == {embedded.placeholder(modality) for modality in embedded.modalities}


def test_models_of_text_need_no_processor(tmp_path: Path) -> None:
    assert processor_for("", tmp_path, {"model_type": "llama"}) is None


def test_full_omni_checkpoints_speak_through_their_thinker(tmp_path: Path) -> None:
    processor = processor_for(
        "qwen_omni:QwenOmni",
        tmp_path,
        {"model_type": "qwen2_5_omni", "thinker_config": {"image_token_index": 7, "audio_config": {}}},
    )
    assert processor is not None
    assert processor.placeholder("image") == 7
    assert processor.placeholder("audio") == 151646


def test_mel_counts_that_disagree_are_named(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text('{"feature_size": 80}')
    with pytest.raises(ValueError, match="80 mels; the audio tower reads 128"):
        QwenOmni(tmp_path, {"audio_config": {"num_mel_bins": 128}})


def test_nested_files_of_newer_checkpoints_are_read(tmp_path: Path) -> None:
    from transformers import WhisperFeatureExtractor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    image = Qwen2VLImageProcessorPil(min_pixels=784 * 3, max_pixels=784 * 50).to_dict()
    audio = WhisperFeatureExtractor(feature_size=96).to_dict()
    video = {"size": {"shortest_edge": 784 * 5, "longest_edge": 784 * 60}, "fps": 1.0, "max_frames": 10}
    nested = {"image_processor": image, "feature_extractor": audio, "video_processor": video}
    (tmp_path / "processor_config.json").write_text(json.dumps(nested, default=list))
    omni = QwenOmni(tmp_path, {"audio_config": {"num_mel_bins": 96}})
    assert (omni.vision.image.min_pixels, omni.vision.image.max_pixels) == (784 * 3, 784 * 50)
    assert (omni.vision.video.min_pixels, omni.vision.video.max_pixels) == (784 * 5, 784 * 60)
    assert (omni.vision.rule.fps, omni.vision.rule.max_frames) == (1.0, 10)
    assert omni.mel.num_mels == 96


def test_flat_files_of_older_checkpoints_size_pictures_not_films(tmp_path: Path) -> None:
    flat = {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2, "feature_size": 128}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(flat))
    omni = QwenOmni(tmp_path, {})
    assert omni.vision.image.max_pixels == 12845056
    assert (omni.vision.video.min_pixels, omni.vision.video.max_pixels) == (128 * 784, 768 * 784)
    assert omni.vision.rule.fps == 2.0


def test_files_that_are_no_objects_are_refused(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"preprocessor_config\.json holds list"):
        read_processor_files(tmp_path)


def test_times_between_frames(tmp_path: Path, embedded: Processor) -> None:
    plan = embedded.plan_film(90, 30.0, 240, 320, PLAIN, LIMITS)
    assert plan.indices.tolist() == [0, 15, 30, 45, 60, 75]
    assert plan.seconds_per_frame == 0.5  # two frames per second, as in training
    short = embedded.plan_film(10, 30.0, 240, 320, PLAIN, LIMITS)
    assert (len(short.indices), short.seconds_per_frame) == (2, 0.5)
    long = embedded.plan_film(3000, 30.0, 240, 320, PLAIN, LIMITS)
    assert len(long.indices) == 32
    assert long.seconds_per_frame == pytest.approx(100 / 32)  # frames were left out: the real distance
    vl = QwenVL(tmp_path, {"model_type": "qwen2_5_vl"})
    assert vl.plan_film(75, 30.0, 240, 320, PLAIN, LIMITS).seconds_per_frame == pytest.approx(2.5 / 4)


def test_long_films_get_smaller_frames_before_they_are_refused(tmp_path: Path) -> None:
    vl = QwenVL(tmp_path, {"model_type": "qwen2_5_vl"})
    short = vl.plan_film(300, 30.0, 1080, 1920, PLAIN, LIMITS)
    long = vl.plan_film(30 * 590, 30.0, 1080, 1920, PLAIN, LIMITS)
    assert len(long.indices) == 256
    assert long.scale.pixels < short.scale.pixels
    assert long.pixels * 24 <= LIMITS.request_decoded_bytes
    assert long.pixels <= LIMITS.video_max_total_pixels
    asked = vl.plan_film(300, 30.0, 1080, 1920, MediaOptions(max_pixels=784 * 16, fps=1.0), LIMITS)
    assert len(asked.indices) == 10
    assert asked.scale.pixels <= 784 * 16


def test_settings_differ_between_processors(tmp_path: Path, embedded: Processor) -> None:
    other = QwenOmni(tmp_path, {"audio_config": {"num_mel_bins": 128}})
    for modality in ("image", "audio", "video"):
        assert other.settings(modality, PLAIN) != embedded.settings(modality, PLAIN)
