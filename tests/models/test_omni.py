"""Qwen2.5-Omni's thinker against transformers: each tower alone, media mixed with text, chunked, and greedy tokens."""

import functools

import pytest
import torch

from engine.base.errors import RequestError
from tests import tiny
from tests.models.harness import Harness, load

TOLERANCE = 1e-4
PATCH_NUMBERS = tiny.CHANNELS * tiny.TEMPORAL * tiny.PATCH**2
load = functools.cache(load)


@functools.cache
def oracle():
    return tiny.reference(tiny.checkpoint("omni"))


def model():
    return load(tiny.checkpoint("omni"))


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def image(h, w, seed=0):
    """A picture of h x w patches: its modality, features and number of rows."""
    features = {"pixel_values": random(h * w, PATCH_NUMBERS, seed=seed), "grid_thw": torch.tensor([[1, h, w]])}
    return "image", features, h * w // 4


def video(t, h, w, seed=0):
    features = {
        "pixel_values": random(t * h * w, PATCH_NUMBERS, seed=seed),
        "grid_thw": torch.tensor([[t, h, w]]),
        "second_per_grid": torch.tensor([0.5]),
    }
    return "video", features, t * h * w // 4


def audio(frames, seed=0):
    return "audio", {"input_features": random(tiny.MELS, frames, seed=seed)}, (frames + 1) // 2 // 2


MARKS = {
    "image": ("<|vision_bos|>", "<|IMAGE|>", "<|vision_eos|>"),
    "video": ("<|vision_bos|>", "<|VIDEO|>", "<|vision_eos|>"),
    "audio": ("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"),
}


def splice(items):
    """Text before, between and after the items: token ids, and where each item's rows start."""
    tokens, starts = [5, 9, 13], []
    for number, (modality, _, rows) in enumerate(items):
        opening, placeholder, closing = (tiny.IDS[mark] for mark in MARKS[modality])
        starts.append(len(tokens) + 1)
        tokens += [opening, *[placeholder] * rows, closing, 20 + number, 40]
    return [*tokens, 7, 8], starts


def oracle_inputs(tokens, items):
    """transformers' arguments for the same prompt."""
    ids = torch.tensor([tokens])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    by_kind = {kind: [features for name, features, _ in items if name == kind] for kind in MARKS}
    if by_kind["image"]:
        inputs["pixel_values"] = torch.cat([item["pixel_values"] for item in by_kind["image"]])
        inputs["image_grid_thw"] = torch.cat([item["grid_thw"] for item in by_kind["image"]])
    if by_kind["video"]:
        inputs["pixel_values_videos"] = torch.cat([item["pixel_values"] for item in by_kind["video"]])
        inputs["video_grid_thw"] = torch.cat([item["grid_thw"] for item in by_kind["video"]])
        inputs["video_second_per_grid"] = torch.cat([item["second_per_grid"] for item in by_kind["video"]])
    if by_kind["audio"]:
        mels = [item["input_features"] for item in by_kind["audio"]]
        longest = max(mel.shape[1] for mel in mels)
        pad = torch.nn.functional.pad
        inputs["input_features"] = torch.stack([pad(mel, (0, longest - mel.shape[1])) for mel in mels])
        inputs["feature_attention_mask"] = torch.stack(
            [pad(torch.ones(mel.shape[1], dtype=torch.long), (0, longest - mel.shape[1])) for mel in mels]
        )
    return inputs


def positions(inputs):
    """M-RoPE positions [axes, tokens] and delta, computed by transformers."""
    mask = inputs.get("feature_attention_mask")
    axes, delta = oracle().model.get_rope_index(
        inputs["input_ids"],
        inputs.get("image_grid_thw"),
        inputs.get("video_grid_thw"),
        inputs["attention_mask"],
        False,
        None if mask is None else mask.sum(-1),
        inputs.get("video_second_per_grid"),
    )
    return axes[:, 0], int(delta)


PROMPTS = {
    "text": [],
    "image": [image(4, 6)],
    "large image": [image(10, 14)],
    "video": [video(3, 6, 4)],
    "audio": [audio(77)],
    "long audio": [audio(321)],
    "two images": [image(4, 4), image(6, 10, seed=1)],
    "image and audio": [image(6, 4), audio(100)],
    "all three": [audio(205, seed=2), video(2, 4, 8), image(8, 4, seed=3)],
    "two sounds": [audio(64), audio(130, seed=1)],
    "two films": [video(2, 4, 4), video(1, 4, 4, seed=1)],
}


@torch.inference_mode()
def prepare(name, harness):
    """The harness row of a prompt, and the oracle's arguments."""
    tokens, starts = splice(PROMPTS[name])
    inputs = oracle_inputs(tokens, PROMPTS[name])
    axes, delta = positions(inputs)
    media = [
        (start, harness.model.towers[kind].encode(features))
        for start, (kind, features, _) in zip(starts, PROMPTS[name])
    ]
    assert [len(rows) for _, rows in media] == [rows for _, _, rows in PROMPTS[name]]
    return harness.add(tokens, positions=axes, delta=delta, media=media), inputs


@functools.cache
@torch.inference_mode()
def expected(name):
    tokens, _ = splice(PROMPTS[name])
    return oracle()(**oracle_inputs(tokens, PROMPTS[name])).logits[0]


@pytest.mark.parametrize("grid", [(1, 2, 2), (1, 4, 6), (2, 10, 6), (3, 4, 14), (1, 16, 16)])
@torch.inference_mode()
def test_vision_tower_equals_transformers(grid):
    pixels, thw = random(grid[0] * grid[1] * grid[2], PATCH_NUMBERS), torch.tensor([grid])
    want = oracle().model.visual(pixels, grid_thw=thw).pooler_output
    for _ in range(2):  # the second run reads cached tables
        got = model().towers["video"].encode({"pixel_values": pixels, "grid_thw": thw})
        assert got.shape == want.shape
        assert (got - want).abs().max() <= TOLERANCE


@pytest.mark.parametrize("frames", [3, 4, 5, 99, 100, 101, 102, 200, 250, 399, 3500])
@torch.inference_mode()
def test_audio_tower_equals_transformers(frames):
    mel = random(tiny.MELS, frames)
    want = oracle().model.audio_tower(mel, feature_lens=torch.tensor([frames])).last_hidden_state
    got = model().towers["audio"].encode({"input_features": mel})
    assert got.shape == want.shape
    assert (got - want).abs().max() <= TOLERANCE


@pytest.mark.parametrize("chunk", [0, 1, 7, 64])
@pytest.mark.parametrize("name", PROMPTS)
def test_mixed_prompts_equal_transformers(name, chunk):
    harness = Harness(model())
    row, _ = prepare(name, harness)
    assert (harness.prefill(row, chunk) - expected(name)).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", PROMPTS)
def test_sixty_four_greedy_tokens_equal_transformers(name):
    harness = Harness(model())
    row, inputs = prepare(name, harness)
    oracle().generation_config.eos_token_id = None
    oracle().model.rope_deltas = None
    out = oracle().generate(**inputs, max_new_tokens=64, do_sample=False)
    assert harness.generate(row, 64, chunk=13) == out[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chunks_do_not_change_a_bit(dtype):
    harness = Harness(load(tiny.checkpoint("omni"), dtype=dtype))
    whole = harness.prefill(prepare("all three", harness)[0])
    for chunk in (1, 13, 64):
        assert torch.equal(harness.prefill(prepare("all three", harness)[0], chunk), whole)


def test_rows_with_and_without_media_in_one_step():
    harness = Harness(model())
    first, _ = prepare("image and audio", harness)
    second, _ = prepare("text", harness)
    harness.step((first, 5))
    got = harness.step((second, len(second.tokens)), (first, len(first.tokens) - 5))
    want = torch.cat([expected("text"), expected("image and audio")[5:]])
    assert (got - want).abs().max() <= TOLERANCE


def test_media_changes_the_answer():
    harness = Harness(model())
    row, _ = prepare("image", harness)
    row.media = []
    assert (harness.prefill(row) - expected("image")).abs().max() > 0.1


def test_features_that_do_not_fit_are_refused_in_words():
    wrong = {"pixel_values": random(12, PATCH_NUMBERS), "grid_thw": torch.tensor([[1, 4, 4]])}
    with pytest.raises(RequestError, match="do not fit the grid 1 x 4 x 4: 16 patches"):
        model().towers["image"].encode(wrong)
    odd = {"pixel_values": random(9, PATCH_NUMBERS), "grid_thw": torch.tensor([[1, 3, 3]])}
    with pytest.raises(RequestError, match="multiples of 2"):
        model().towers["image"].encode(odd)
    with pytest.raises(RequestError, match="at least 3 frames"):
        model().towers["audio"].encode({"input_features": random(tiny.MELS, 2)})


def test_tables_of_grids_are_bounded():
    from engine.encoders.recent import Recent

    recent = Recent(10)
    for key in range(5):
        recent.put(key, str(key), 4)
    assert len(recent) == 2
    assert recent.total == 8
    assert recent.get(4) == "4"
    assert recent.get(0) is None
    recent.get(3)
    recent.put(5, "5", 4)
    assert recent.get(3) == "3"  # key 3 was read after key 4, so 4 was evicted
    assert recent.get(4) is None
    recent.put(6, "6", 11)
    assert recent.get(6) is None


def test_bfloat16_towers_and_decoder_stay_near_float32():
    served = load(tiny.checkpoint("omni"), dtype="bfloat16")
    harness = Harness(served)
    row, _ = prepare("all three", harness)
    assert all(rows.dtype == torch.bfloat16 for _, rows in row.media)
    got, want = harness.prefill(row, 32), expected("all three")
    assert (got - want).abs().mean() < 0.1 * want.abs().mean() + 0.02


def test_pixels_become_the_patches_that_a_processor_makes():
    side = tiny.PATCH * 2
    pixels = torch.randint(0, 256, (3, 2 * side, side, 3), dtype=torch.uint8)
    keep = [torch.stack([torch.arange(n), torch.full((n,), 1 << 22)]).int() for n in (side, 2 * side)]
    normal = torch.tensor([0.1, 0.2, 0.3, 1.0, 2.0, 3.0])
    given = {"pixels": pixels, "columns": keep[0], "rows": keep[1], "normal": normal}
    grid = torch.tensor([[2, 4, 2]])
    got = model().towers["video"].encode({**given, "grid_thw": grid})
    values = torch.cat([pixels, pixels[-1:]]).float() * normal[:3] - normal[3:]
    cut = values.view(2, tiny.TEMPORAL, 2, 2, tiny.PATCH, 1, 2, tiny.PATCH, 3)
    patches = cut.permute(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(16, PATCH_NUMBERS)
    assert torch.equal(got, model().towers["video"].encode({"pixel_values": patches, "grid_thw": grid}))
    with pytest.raises(RequestError, match="do not fit the grid"):
        model().towers["video"].encode({**given, "grid_thw": torch.tensor([[2, 2, 2]])})
