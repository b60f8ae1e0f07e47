"""Films of models without a file here: transformers' tower, decoder and processor in our steps."""

import asyncio
import functools
import hashlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor

from engine import Request, SamplingParams
from engine.models.registry import build_model, load_model_config
from engine.weights.load import load_weights, weight_bytes
from mm.decode.alarm import Alarm
from mm.errors import MediaError
from mm.item import MediaItem, MediaOptions
from mm.limits import MediaLimits
from mm.open import Encoded, open_video
from mm.processors.registry import processor_for
from mm.splice import splice
from server import cli
from tests import tiny, tiny_films
from tests.engine.host_accelerator import HostAccelerator
from tests.engine_kit import answer
from tests.invariance.devices import Device
from tests.mm.made import film, noise, ramp
from tests.models.harness import Harness, generated

NAMES = tuple(tiny_films.CHECKPOINTS)
WAYS = {"qwen2_5_vl_films": "transformers"}  # this model has a file here; of the others, only the decoders have
TOKENS = 10
PLAIN, LIMITS = MediaOptions(), MediaLimits()
PICTURE, FILM = ("image", 60, 90), ("video", 30, 10.0, 60, 80)  # frames, frames per second, height and width
SLOW, FAST = ("video", 9, 3.0, 50, 40), ("video", 48, 16.0, 90, 60)
PROMPTS = {
    "text": (),
    "film": (FILM,),
    "two films": (SLOW, FAST),
    "film, picture, film": (FAST, PICTURE, FILM),
}


@functools.cache
def load(name):
    config = load_model_config(tiny.checkpoint(name), implementation=WAYS.get(name, "auto"))
    assert (config.implementation, config.modalities) == (WAYS.get(name, "mixed"), ("text", "image", "video"))
    model = build_model(config, torch.float32)
    load_weights(model, config.folder)
    return model


@functools.cache
def processor(name):
    config = load_model_config(tiny.checkpoint(name), implementation=WAYS.get(name, "auto"))
    return processor_for(config.processor, config.folder, config.raw)


@functools.cache
def oracle(name):
    return tiny.reference(tiny.checkpoint(name))


def whole(shape):
    """All frames of the film, uint8 [frames, height, width, 3]."""
    _, frames, _, height, width = shape
    return np.stack([noise(height, width, frame) for frame in range(frames)])


def decoded(name, shape, options=PLAIN):
    """An item as our decoder returns it: of a film, the sampled frames."""
    if shape[0] == "image":
        return MediaItem("image", noise(*shape[1:]))
    plan = processor(name).plan_film(*shape[1:], options, LIMITS)
    assert (plan.scale.height, plan.scale.width) == shape[3:]
    return MediaItem("video", whole(shape)[plan.indices], plan.seconds_per_frame, plan.seconds, plan)


@functools.cache
def spliced(name, prompt):
    reads, tokens, slots, processed = processor(name), [5, 9, 13], [], []
    for number, shape in enumerate(PROMPTS[prompt]):
        slots.append(len(tokens))
        tokens += [reads.placeholder(shape[0]), 20 + number]
        digest = hashlib.blake2b(repr(shape).encode(), digest_size=16).digest()
        processed.append(reads.process(decoded(name, shape), digest, PLAIN))
    return splice([*tokens, 7, 8], slots, processed, reads)


@functools.cache
def oracle_inputs(name, prompt):
    """The whole prompt in one call of transformers' processor; a processor that samples frames gets whole films."""
    theirs, ours, items = AutoProcessor.from_pretrained(tiny.checkpoint(name)), processor(name), PROMPTS[prompt]
    text, films, told = "", [], []
    samples = theirs.video_processor.do_sample_frames
    for number, shape in enumerate(items):
        text += ours.marks[shape[0]] + theirs.tokenizer.decode([20 + number])
        if shape[0] == "video":
            frames, (_, total, fps, *_) = whole(shape), shape
            kept = [*range(total)] if samples else [frame * total // 8 for frame in range(8)]
            films.append(frames[kept])
            told.append({"total_num_frames": total, "fps": fps, "duration": total / fps, "frames_indices": kept})
    images = [Image.fromarray(noise(*shape[1:])) for shape in items if shape[0] == "image"]
    shown = {"videos": films, "video_metadata": told, "do_sample_frames": samples} if films else {}
    made = theirs(text=[text or "a"], images=images or None, add_special_tokens=False, return_tensors="pt", **shown)
    ids = [5, 9, 13, *(made.pop("input_ids")[0].tolist() if items else []), 7, 8]
    assert ids == spliced(name, prompt).prompt_token_ids.tolist()
    kept = {key: made[key] for key in made if key not in ("input_ids", "attention_mask", "mm_token_type_ids")}
    ids = torch.tensor([ids])
    if "mm_token_type_ids" in made and items:
        kinds = (ids == ours.row_ids["image"]).int() + 2 * (ids == ours.row_ids["video"]).int()
        kept["mm_token_type_ids"] = kinds
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **(kept if items else {})}


@functools.cache
def wanted(name, prompt):
    return generated(oracle(name), oracle_inputs(name, prompt), TOKENS)


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_logits_equal_transformers(name, prompt):
    """Logits are equal in one step and in chunks."""
    model, made, media = load(name), spliced(name, prompt), []
    for item in made.media:
        features = {key: torch.tensor(value) for key, value in item.features.items()}
        rows, done = model.towers[item.modality].encode(features), 0
        assert len(rows) == item.num_tokens <= model.towers[item.modality].weight(features)
        for start, length in item.spans:
            media.append((start, rows[done : done + length]))
            done += length
    positions = None if made.positions is None else torch.tensor(made.positions, dtype=torch.int64)
    want = oracle(name)(**oracle_inputs(name, prompt)).logits[0]
    harness = Harness(model)
    for chunk in ((), (7,)):
        row = harness.add(made.prompt_token_ids.tolist(), positions=positions, delta=made.position_delta, media=media)
        assert (harness.prefill(row, *chunk) - want).abs().max() <= 2e-4


def request(name, prompt):
    made = spliced(name, prompt)
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    return Request(
        made.prompt_token_ids, sampling, media=made.media, positions=made.positions, position_delta=made.position_delta
    )


@pytest.mark.parametrize("device", ["cpu", "accelerator"])
@pytest.mark.parametrize("name", NAMES)
async def test_greedy_tokens_equal_transformers(name, device, monkeypatch):
    """Tokens are equal alone and in a batch, and in an accelerator's padded and recorded steps."""
    if device == "accelerator":
        monkeypatch.setattr("engine.run.start.open_accelerator", lambda _device: HostAccelerator())
    want = {prompt: await asyncio.to_thread(wanted, name, prompt) for prompt in PROMPTS}
    settings = {"model_impl": WAYS.get(name, "auto"), "enable_prefix_caching": False, "max_model_len": 1024}
    async with Device("cpu").running(tiny.checkpoint(name), **settings) as engine:
        alone = [(await answer(engine, request(name, prompt)))[0] for prompt in PROMPTS]
        sent = [answer(engine, request(name, prompt)) for prompt in PROMPTS for _ in range(2)]
        together = [choices[0] for choices in await asyncio.gather(*sent)]
    assert alone == list(want.values())
    assert together == [tokens for tokens in want.values() for _ in range(2)]


@pytest.mark.parametrize(
    ("name", "frames", "fps", "options", "kept"),
    [
        ("llava_next_video", 40, 10.0, {}, [0, 5, 10, 15, 20, 25, 30, 35]),  # no file names a number: the default is 8
        ("llava_next_video", 3, 10.0, {}, [0, 1, 2]),
        ("video_llava", 30, 10.0, {}, [0, 5, 10, 15, 20, 25]),  # two a second
        ("video_llava", 3, 1.0, {}, [0, 1, 2]),  # fewer frames than two a second
        ("qwen2_5_vl_films", 40, 10.0, {}, [0, 8, 16, 24, 32]),
        ("video_llava", 30, 10.0, {"num_frames": 3}, [0, 10, 20]),
        ("qwen2_5_vl_films", 30, 10.0, {"fps": 1.0}, [0, 10, 20]),
        ("qwen2_5_vl_films", 3, 10.0, {"num_frames": 9}, [0, 1, 2]),
    ],
)
def test_which_frames_are_sampled(name, frames, fps, options, kept):
    """The checkpoint's files or the request choose the frames."""
    reads, chosen = processor(name), MediaOptions(**options)
    plan = reads.plan_film(frames, fps, 60, 80, chosen, LIMITS)
    assert plan.indices.tolist() == kept
    assert plan.seconds.tolist() == [frame / fps for frame in kept]
    assert (reads.settings("video", chosen) != reads.settings("video", PLAIN)) is bool(options)


def test_a_film_has_as_many_frames_and_pixels_as_the_server_keeps():
    few = replace(LIMITS, video_max_frames=4, video_max_total_pixels=4 * 30 * 40)
    plan = processor("llava_next_video").plan_film(40, 10.0, 60, 80, PLAIN, few)
    assert plan.indices.tolist() == [0, 10, 20, 30]
    assert (plan.scale.height, plan.scale.width) == (30, 40)


@torch.inference_mode()
def test_times_reach_the_processor():
    """Qwen2.5-VL: frames two seconds apart have positions farther apart than frames a fifth of a second apart."""
    reads, spans = processor("qwen2_5_vl_films"), []
    for fps in (1.0, 10.0):
        item = reads.process(decoded("qwen2_5_vl_films", ("video", 10, fps, 60, 80)), bytes(16), PLAIN)
        made = splice([5, reads.placeholder("video"), 7], [1], [item], reads)
        spans.append(int(made.positions[0].max()))
        assert item.parts[0].features["second_per_grid_ts"].tolist() == pytest.approx([2 * 2 / fps])
    assert spans[0] > spans[1]


def test_frames_of_a_file_reach_the_processor_with_their_times(monkeypatch):
    reads, given = processor("video_llava"), {}
    call = type(reads.processor).__call__
    monkeypatch.setattr(
        type(reads.processor), "__call__", lambda self, **more: given.update(more) or call(self, **more)
    )
    data = film(ramp(30), fps=10)
    item = open_video(Encoded(data, "mp4", LIMITS, reads, MediaOptions(fps=1.0)), Alarm()).decode(Alarm())
    assert reads.process(item, bytes(16), PLAIN).parts[0].num_tokens == 3 * 17
    (told,), (frames,) = given["video_metadata"], given["videos"]
    assert (told.total_num_frames, told.fps, told.timestamps) == (30, 10.0, [0.0, 1.0, 2.0])
    assert np.abs(frames.mean((1, 2, 3)) - [20, 40, 60]).max() < 3


def test_a_class_that_takes_no_films_refuses_them():
    config = load_model_config(tiny.checkpoint("paddleocr_vl"))
    reads = processor_for(config.processor, config.folder, config.raw)
    assert config.modalities == ("text", "image")
    assert reads.modalities == {"image"}
    with pytest.raises(MediaError, match="this model does not read videos"):
        reads.plan_film(8, 1.0, 60, 80, PLAIN, LIMITS)


def test_check_says_what_it_takes(capsys):
    assert cli.main(["check", str(tiny.checkpoint("video_llava"))]) == 0
    said = capsys.readouterr().out.splitlines()[1]
    assert said == (
        "served: its decoder natively, its encoders through transformers (VideoLlavaForConditionalGeneration); "
        "takes text, image, video"
    )


@pytest.mark.parametrize(("without", "left"), [("video", "image"), ("image", "video")])
@pytest.mark.parametrize("name", ["video_llava", "llava_next_video"])
@torch.inference_mode()
def test_what_no_prompt_will_hold_has_no_tower(name, without, left):
    """Video-LLaVA has a tower for films only; LLaVA-NeXT-Video has one tower for both."""
    config = load_model_config(tiny.checkpoint(name), without=(without,))
    assert config.modalities == ("text", left)
    assert config.processor == ("watching:Watching" if left == "video" else "through:Through")
    model, whole_one = build_model(config, torch.float32), load(name)
    load_weights(model, config.folder)
    assert model.towers.keys() == {left}
    fewer = weight_bytes(model) < weight_bytes(whole_one)
    assert fewer == (name == "video_llava")
    made = spliced(name, "film, picture, film")
    features = next(item.features for item in made.media if item.modality == left)
    given = {key: torch.tensor(value) for key, value in features.items()}
    assert torch.equal(model.towers[left].encode(given), whole_one.towers[left].encode(given))


def test_a_limit_of_no_films_is_what_check_says(capsys):
    folder = str(tiny.checkpoint("video_llava"))
    assert cli.main(["check", folder, "--limit-mm-per-prompt", '{"video": 0}']) == 0
    assert capsys.readouterr().out.splitlines()[1].endswith("takes text, image")
