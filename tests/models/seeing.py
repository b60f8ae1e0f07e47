"""Prompts with pictures and films for vision models: spliced by our processors, and as rows of a harness."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import replace

import numpy as np
import torch

from engine.models.registry import load_model_config
from mm.item import MediaItem, MediaOptions
from mm.limits import MediaLimits
from mm.processors.registry import processor_for
from mm.splice import splice
from tests import tiny
from tests.mm.made import noise
from tests.models.harness import Harness
from tests.models.harness import load as load_model

PLAIN = MediaOptions()
load = functools.cache(load_model)


@functools.cache
def encode(text):
    """The tiny tokenizer's ids, without special tokens."""
    from tokenizers import Tokenizer

    core = Tokenizer.from_file(str(tiny.checkpoint("llama") / "tokenizer.json"))
    return tuple(core.encode(text, add_special_tokens=False).ids)


@functools.cache
def oracle(name):
    model = tiny.reference(tiny.checkpoint(name))
    if (
        name == "llama4-vision"
    ):  # transformers 5.24 reads image_outputs of the decoder's output, which has no such field
        from transformers.modeling_outputs import MoeCausalLMOutputWithPast as Answer

        Answer.image_outputs = getattr(Answer, "image_outputs", None)
    return model


@functools.cache
def processor(name):
    config = load_model_config(tiny.checkpoint(name))
    return processor_for(config.processor, config.folder, config.raw, 0, encode)


def options_of(prompt):
    return replace(PLAIN, do_pan_and_scan=prompt == "cropped picture")


def picture(name, height, width, seed=0, options=PLAIN):
    scale = processor(name).plan_image(height, width, options)
    if processor(name).picture_bytes:  # the model scales pictures itself
        return MediaItem("image", noise(height, width, seed), scale=scale)
    return MediaItem("image", scale.array(noise(height, width, seed)))


def film(name, frames, fps, height, width, seed=0):
    plan = processor(name).plan_film(frames, fps, height, width, PLAIN, MediaLimits())
    kept = [plan.scale.array(noise(height, width, seed + int(index))) for index in plan.indices]
    return MediaItem("video", np.stack(kept), plan.seconds_per_frame, plan.seconds)


PROMPTS = {
    "text": (),
    "picture": ((picture, 60, 90),),
    "large picture": ((picture, 200, 170),),
    "two pictures": ((picture, 90, 60), (picture, 50, 50, 3)),
    "cropped picture": ((picture, 260, 600, 0, replace(PLAIN, do_pan_and_scan=True)), (picture, 50, 50, 3)),
    "three pictures": ((picture, 60, 90), (picture, 90, 60, 1), (picture, 60, 90)),
    "film": ((film, 30, 10.0, 60, 80),),
    "slow film": ((film, 9, 1.0, 40, 60),),
    "picture, film, picture": ((picture, 90, 60), (film, 40, 12.5, 60, 60), (picture, 50, 50, 3)),
}


@functools.cache
def items(name, prompt):
    return tuple(make(name, *sizes) for make, *sizes in PROMPTS[prompt])


@functools.cache
def spliced(name, prompt):
    tokens, slots, processed = [5, 9, 13], [], []
    options = replace(options_of(prompt), num_pictures=sum(item.modality == "image" for item in items(name, prompt)))
    for number, item in enumerate(items(name, prompt)):
        slots.append(len(tokens) + 1)
        mark = processor(name).placeholder(item.modality)
        tokens += [tiny.IDS["<|vision_bos|>"], mark, tiny.IDS["<|vision_eos|>"], 20 + number]
        digest = hashlib.blake2b(repr(item.data.shape).encode() + item.data.tobytes(), digest_size=16).digest()
        processed.append(processor(name).process(item, digest, options))
    return splice([*tokens, 7, 8], slots, processed, processor(name)), processed


@torch.inference_mode()
def prepare(name, prompt, harness: Harness):
    """The prompt as a row of the harness, with its media encoded."""
    made, processed = spliced(name, prompt)
    parts = [part for item in processed for part in item.parts]
    assert [item.num_tokens for item in made.media] == [part.num_tokens for part in parts]
    media = []
    for item, part in zip(made.media, parts):
        features = {key: torch.tensor(value) for key, value in part.features.items()}
        rows = harness.model.towers[part.modality].encode(features)
        assert len(rows) == item.num_tokens
        done = 0
        for start, length in item.spans:
            media.append((start, rows[done : done + length]))
            done += length
    positions = None if made.positions is None else torch.tensor(made.positions, dtype=torch.int64)
    return harness.add(made.prompt_token_ids.tolist(), positions=positions, delta=made.position_delta, media=media)


def assert_logits_agree(name, prompt, chunk, want, tolerance):
    """The log-probabilities behind a prompt, computed in chunks (0: whole), equal those of the logits `want`."""
    harness = Harness(load(tiny.checkpoint(name)))
    got = harness.prefill(prepare(name, prompt, harness), chunk).log_softmax(-1)
    assert (got - want.log_softmax(-1)).abs().max() <= tolerance


def answered(name, prompt, count):
    """The greedy tokens behind a prompt that is computed in chunks."""
    harness = Harness(load(tiny.checkpoint(name)))
    return harness.generate(prepare(name, prompt, harness), count, chunk=13)
