"""Prompt layout and M-RoPE positions against transformers, exactly, over random mixes of text and media."""

from __future__ import annotations

import random
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from mm.item import MediaOptions, Part, Processed
from mm.processors.qwen_omni import QwenOmni
from mm.processors.qwen_vl import QwenVL
from mm.splice import splice

torch = pytest.importorskip("torch")

VISION_START, VISION_END, AUDIO_START, AUDIO_END = 90, 91, 92, 93
IMAGE, VIDEO, AUDIO = 94, 95, 96
OMNI = {
    "model_type": "qwen2_5_omni_thinker",
    "image_token_index": IMAGE,
    "video_token_index": VIDEO,
    "audio_token_index": AUDIO,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
    "audio_start_token_id": AUDIO_START,
    "audio_end_token_id": AUDIO_END,
    "position_id_per_seconds": 25,
    "seconds_per_chunk": 2,
}
FORTY_MIXES = range(40)


def grid_part(kind: str, rng: random.Random, seconds: float = 0.0) -> Part:
    times = 1 if kind == "image" else rng.randint(1, 9)
    rows, columns = rng.randint(1, 6), rng.randint(1, 40 if rng.random() < 0.1 else 6)
    features = {"grid_thw": np.array([[times, rows * 2, columns * 2]], np.int64)}
    if kind == "video":
        features["second_per_grid"] = np.array([seconds], np.float32)
    return Part(kind, bytes(16), times * rows * columns, features)


def sound_part(rng: random.Random) -> tuple[Part, int]:
    frames = rng.randint(3, 1200)
    return Part("audio", bytes(16), ((frames - 1) // 2 + 1 - 2) // 2 + 1, {}), frames


def text(rng: random.Random, least: int = 0) -> list[int]:
    return [rng.randint(1, 80) for _ in range(rng.randint(least, 12))]


class Mix:
    """A random prompt before splicing, and the inputs that the oracle needs for its media."""

    def __init__(self, seed: int, heard: bool, kinds: tuple[str, ...]) -> None:
        rng = random.Random(seed)
        self.heard = heard
        self.token_ids = text(rng)
        self.slots: list[int] = []
        self.processed: list[Processed] = []
        self.sounds: list[int] = []
        for _ in range(rng.randint(1, 6)):
            kind = rng.choice(kinds)
            if kind == "audio":
                part, frames = sound_part(rng)
                self._add(AUDIO_START, AUDIO, AUDIO_END, Processed("audio", (part,)), rng)
                self.sounds.append(frames)
            elif kind == "image":
                self._add(VISION_START, IMAGE, VISION_END, Processed("image", (grid_part("image", rng),)), rng)
            else:
                parts = [grid_part("video", rng, rng.choice((1.0, 0.5, 2.0, 0.8, 1 / 3)))]
                if heard:
                    part, frames = sound_part(rng)
                    parts.append(part)
                    self.sounds.append(frames)
                self._add(VISION_START, VIDEO, VISION_END, Processed("video", tuple(parts)), rng)

    def _add(self, start: int, token: int, end: int, item: Processed, rng: random.Random) -> None:
        self.slots.append(len(self.token_ids) + 1)
        self.token_ids += [start, token, end, *text(rng, 1)]
        self.processed.append(item)

    def grids(self, kind: str):
        rows = [part.features["grid_thw"][0] for item in self.processed for part in item.parts if part.modality == kind]
        return torch.tensor(np.array(rows)) if rows else None

    def seconds(self):
        values = [p.features["second_per_grid"][0] for i in self.processed for p in i.parts if p.modality == "video"]
        return torch.tensor(np.array(values)) if values else None


@pytest.fixture(scope="module")
def omni(tmp_path_factory) -> QwenOmni:
    return QwenOmni(tmp_path_factory.mktemp("omni"), OMNI)


def omni_oracle(mix: Mix, token_ids: np.ndarray):
    from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as modeling

    kind = modeling.Qwen2_5OmniPreTrainedModelForConditionalGeneration
    config = SimpleNamespace(**OMNI, image_token_id=IMAGE, video_token_id=VIDEO, audio_token_id=AUDIO)
    model = SimpleNamespace(spatial_merge_size=2, config=config)
    model.get_llm_pos_ids_for_vision = partial(kind.get_llm_pos_ids_for_vision, model)
    model.get_chunked_index = partial(kind.get_chunked_index, model)
    ids = torch.tensor(token_ids, dtype=torch.long)[None]
    sounds = torch.tensor(mix.sounds) if mix.sounds else None
    positions, delta = kind.get_rope_index(
        model, ids, mix.grids("image"), mix.grids("video"), torch.ones_like(ids), mix.heard, sounds, mix.seconds()
    )
    return positions[:, 0].numpy(), int(delta)


@pytest.mark.parametrize("heard", [False, True])
@pytest.mark.parametrize("seed", FORTY_MIXES)
def test_omni_positions_equal_the_reference(omni: QwenOmni, seed: int, heard: bool) -> None:
    mix = Mix(seed, heard, ("image", "video", "audio"))
    spliced = splice(mix.token_ids, mix.slots, mix.processed, omni)
    expected, delta = omni_oracle(mix, spliced.prompt_token_ids)
    positions = spliced.positions
    if positions is None:
        positions = np.broadcast_to(np.arange(len(spliced.prompt_token_ids)), expected.shape)
    np.testing.assert_array_equal(positions, expected)
    assert spliced.position_delta == delta


@pytest.mark.parametrize("seed", range(20))
def test_film_with_sound_has_the_tokens_of_the_reference(omni: QwenOmni, seed: int) -> None:
    from transformers.models.qwen2_5_omni.processing_qwen2_5_omni import Qwen2_5OmniProcessor

    rng = random.Random(seed)
    film, (sound, _) = grid_part("video", rng, rng.choice((1.0, 0.5, 2.0))), sound_part(rng)
    processor = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2),
        audio_bos_token="<",
        audio_eos_token=">",
        video_token="V",
        audio_token="A",
    )
    processor.get_chunked_index = partial(Qwen2_5OmniProcessor.get_chunked_index, processor)
    expected = Qwen2_5OmniProcessor.replace_video_with_audio_token(
        processor,
        {"video_grid_thw": film.features["grid_thw"], "video_second_per_grid": film.features["second_per_grid"]},
        0,
        {"num_audio_tokens": [sound.num_tokens]},
        0,
        position_id_per_seconds=25,
        seconds_per_chunk=2.0,
    )
    filling = omni.fill(Processed("video", (film, sound)))
    letters = {AUDIO_START: "<", AUDIO_END: ">", VIDEO: "V", AUDIO: "A"}
    assert "".join(letters[int(token)] for token in filling.token_ids) == expected


def vl_oracle(kind, mix: Mix, token_ids: np.ndarray):
    config = SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2, tokens_per_second=4))
    model = SimpleNamespace(config=config)
    model.get_vision_position_ids = partial(kind.get_vision_position_ids, model)
    ids = torch.tensor(token_ids, dtype=torch.long)[None]
    types = torch.where(ids == IMAGE, 1, torch.where(ids == VIDEO, 2, 0)).int()
    seconds = {"second_per_grid_ts": mix.seconds()} if "2_5" in kind.__module__ else {}
    positions, delta = kind.get_rope_index(
        model, ids, types, image_grid_thw=mix.grids("image"), video_grid_thw=mix.grids("video"), **seconds
    )
    return positions[:, 0].numpy(), int(delta)


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("seed", range(25))
def test_vl_positions_equal_the_reference(tmp_path, model_type: str, seed: int) -> None:
    if model_type == "qwen2_vl":
        from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel as Oracle
    else:
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel as Oracle

    config = {"model_type": model_type, "image_token_id": IMAGE, "video_token_id": VIDEO}
    config["vision_config"] = {"tokens_per_second": 4}
    mix = Mix(seed, False, ("image", "video"))
    spliced = splice(mix.token_ids, mix.slots, mix.processed, QwenVL(tmp_path, config))
    expected, delta = vl_oracle(Oracle, mix, spliced.prompt_token_ids)
    np.testing.assert_array_equal(spliced.positions, expected)
    # generate() continues after the last token; get_rope_index's delta counts from a film's last second, if later.
    assert spliced.position_delta == expected[:, -1].max() + 1 - len(spliced.prompt_token_ids) <= delta


def test_text_and_sound_alone_need_no_positions(omni: QwenOmni) -> None:
    part, _ = sound_part(random.Random(0))
    spliced = splice([1, AUDIO_START, AUDIO, AUDIO_END, 2], [2], [Processed("audio", (part,))], omni)
    assert spliced.positions is None
    assert spliced.position_delta == 0
    assert spliced.counts == {"audio": part.num_tokens}


def test_options_are_part_of_the_settings(omni: QwenOmni) -> None:
    plain, lowered = MediaOptions(), MediaOptions(max_pixels=28 * 28 * 16)
    assert omni.settings("image", plain) != omni.settings("image", lowered)
    assert omni.settings("video", plain) != omni.settings("video", MediaOptions(use_audio_in_video=True))
    assert omni.settings("audio", plain) == omni.settings("audio", lowered)
