"""Audio models without a file here: transformers' tower, decoder and processor in our steps."""

import asyncio
import functools

import numpy as np
import pytest
import torch
from transformers import AutoProcessor, MossTranscribeDiarizeProcessor

from engine import Request, SamplingParams
from engine.base.errors import ConfigError
from engine.cache.layout import CacheLayout
from engine.models.registry import build_model, load_model_config
from engine.models.transformers_backend import seeing, showing
from engine.weights.load import load_weights
from mm.errors import MediaError
from mm.item import MediaItem, MediaOptions
from mm.processors.registry import processor_for
from mm.splice import splice
from server import cli
from tests import tiny
from tests.engine.host_accelerator import HostAccelerator
from tests.engine_kit import answer
from tests.invariance.devices import Device
from tests.models.harness import Harness, generated

NAME, TOKENS, CHUNK = "moss_transcribe_diarize", 12, 11
PROMPTS = ((), (9000,), (40000, 16000, 3000))  # samples of each sound; a window has two seconds


@functools.cache
def load():
    config = load_model_config(tiny.checkpoint(NAME))
    assert (config.implementation, config.modalities) == ("mixed", ("text", "audio"))
    model = build_model(config, torch.float32)
    load_weights(model, config.folder)
    return model


@functools.cache
def oracle():
    return tiny.reference(tiny.checkpoint(NAME))


@functools.cache
def processor():
    config = load_model_config(tiny.checkpoint(NAME))
    return processor_for(config.processor, config.folder, config.raw)


def sound(count):
    return np.random.default_rng(count).normal(0, 0.1, count).astype(np.float32)


@functools.cache
def spliced(prompt):
    reads, tokens, slots, processed = processor(), [5, 9, 13], [], []
    for number, count in enumerate(prompt):
        slots.append(len(tokens))
        tokens += [reads.placeholder("audio"), 20 + number]
        processed.append(reads.process(MediaItem("audio", sound(count)), count.to_bytes(16, "little"), MediaOptions()))
    return splice([*tokens, 7, 8], slots, processed, reads)


@functools.cache
def oracle_inputs(prompt):
    """The whole prompt in one call of transformers' processor, which writes a number after each second of sound."""
    theirs, ours = AutoProcessor.from_pretrained(tiny.checkpoint(NAME)), processor()
    text = "".join(ours.marks["audio"] + theirs.tokenizer.decode([20 + number]) for number in range(len(prompt)))
    sounds = {"audio": [sound(count) for count in prompt], "sampling_rate": 16000} if prompt else {}
    made = theirs(text=[text or "a"], add_special_tokens=False, return_tensors="pt", **sounds)
    ids = [5, 9, 13, *(made.pop("input_ids")[0].tolist() if prompt else []), 7, 8]
    assert ids == spliced(prompt).prompt_token_ids.tolist()
    ids = torch.tensor([ids])
    kept = {key: value for key, value in made.items() if key not in ("attention_mask", "input_ids")}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **kept}


@torch.inference_mode()
def prepare(prompt, harness):
    made, media = spliced(prompt), []
    for item in made.media:
        rows = harness.model.towers["audio"].encode({key: torch.tensor(value) for key, value in item.features.items()})
        assert len(rows) == item.num_tokens
        done = 0
        for start, length in item.spans:
            media.append((start, rows[done : done + length]))
            done += length
    return harness.add(made.prompt_token_ids.tolist(), media=media)


@pytest.mark.parametrize("prompt", PROMPTS)
@torch.inference_mode()
def test_logits_equal_transformers(prompt):
    """Logits are equal in one step and in chunks."""
    harness = Harness(load())
    want = oracle()(**oracle_inputs(prompt)).logits[0]
    assert (harness.prefill(prepare(prompt, harness)) - want).abs().max() <= 2e-4
    assert (harness.prefill(prepare(prompt, harness), 7) - want).abs().max() <= 2e-4


def request(prompt):
    made = spliced(prompt)
    return Request(made.prompt_token_ids, SamplingParams(TOKENS, 0.0, ignore_eos=True), media=made.media)


@functools.cache
def wanted(prompt):
    return generated(oracle(), oracle_inputs(prompt), TOKENS)


@pytest.mark.parametrize("device", ["cpu", "accelerator"])
async def test_tokens_of_a_busy_engine_equal_transformers(device, monkeypatch):
    """Tokens are equal in batches, in chunks, preempted, from the prefix cache, and in an accelerator's steps."""
    if device == "accelerator":
        monkeypatch.setattr("engine.run.start.open_accelerator", lambda _device: HostAccelerator())
    want = {prompt: await asyncio.to_thread(wanted, prompt) for prompt in PROMPTS}
    longest = max(len(spliced(prompt).prompt_token_ids) for prompt in PROMPTS) + TOKENS
    one = CacheLayout(load().cache_specs(), 16).blocks_for(longest, CHUNK)  # blocks of a row
    few = {"max_prefill_chunk": CHUNK, "max_model_len": longest, "num_gpu_blocks_override": one + 1}
    async with Device("cpu").running(tiny.checkpoint(NAME), **few) as engine:
        for _ in range(2):
            sent = [answer(engine, request(prompt)) for prompt in want for _ in range(2)]
            got = [choices[0] for choices in await asyncio.gather(*sent)]
            assert got == [want[prompt] for prompt in want for _ in range(2)]
        assert engine.stats.preemptions > 0


def test_check_says_how_it_is_served(capsys):
    assert cli.main(["check", str(tiny.checkpoint(NAME))]) == 0
    said = capsys.readouterr().out.splitlines()[1]
    assert said == (
        "served: its decoder natively, its encoders through transformers "
        "(MossTranscribeDiarizeForConditionalGeneration); takes text, audio"
    )


def test_a_processor_that_numbers_sounds_is_refused(monkeypatch):
    def numbered(self, audio_inputs, audio_idx, **_):
        return f"{audio_idx}{self.audio_token}"

    config = load_model_config(tiny.checkpoint(NAME))
    monkeypatch.setattr(MossTranscribeDiarizeProcessor, "replace_audio_token", numbered)
    with pytest.raises(ValueError, match="writes audio items of one prompt otherwise than each of them alone"):
        processor_for(config.processor, config.folder, config.raw)


def test_a_processor_may_take_one_sound_of_a_text_only(monkeypatch):
    init, validate = load_model_config(tiny.checkpoint(NAME)), MossTranscribeDiarizeProcessor.validate_inputs

    def strict(self, text=None, audio=None, **more):
        if audio is not None and len(audio) != len(text):
            raise ValueError("they must match 1:1")
        validate(self, text=text, audio=audio, **more)

    monkeypatch.setattr(MossTranscribeDiarizeProcessor, "validate_inputs", strict)
    assert processor_for(init.processor, init.folder, init.raw).modalities == {"audio"}


def test_a_refusal_by_a_processor_is_reported(monkeypatch):
    def refuse(*_, **__):
        raise ValueError("too\nshort")

    reads = processor()
    monkeypatch.setattr(reads, "_made", refuse)
    with pytest.raises(MediaError, match="this model's processor refuses the audio item: too short"):
        reads.process(MediaItem("audio", sound(9)), bytes(16), MediaOptions())


def test_a_rate_that_sounds_are_not_decoded_to_is_refused(monkeypatch):
    config = load_model_config(tiny.checkpoint(NAME))
    made = AutoProcessor.from_pretrained(config.folder)
    made.feature_extractor.sampling_rate = 24_000
    monkeypatch.setattr(AutoProcessor, "from_pretrained", lambda *_, **__: made)
    with pytest.raises(ValueError, match="its processor takes audio at 24000 samples a second; audio"):
        processor_for(config.processor, config.folder, config.raw)


def test_a_class_that_does_more_with_a_sound_is_refused(monkeypatch):
    from transformers import MossTranscribeDiarizeModel

    forward = MossTranscribeDiarizeModel.forward

    def louder(self, input_ids=None, input_features=None, input_features_mask=None, **more):
        found = self.get_audio_features(input_features, input_features_mask).pooler_output
        embeds = self.get_input_embeddings()(input_ids) + found.mean()
        return self.language_model(inputs_embeds=embeds, **more)

    louder.__signature__ = showing.inspect.signature(forward)
    monkeypatch.setattr(MossTranscribeDiarizeModel, "forward", louder)
    monkeypatch.setattr(seeing, "_shape", seeing._shape.__wrapped__)  # without the cached result of the real class
    said = "^MossTranscribeDiarizeForConditionalGeneration: does .* with a sound"
    with pytest.raises(ConfigError, match=said):
        load_model_config(tiny.checkpoint(NAME))


def test_silence_of_the_start_has_at_most_as_many_rows():
    tower = load().towers["audio"]
    for rows in (30, 200):
        with torch.inference_mode():
            assert rows / 2 < len(tower.encode(tower.example("audio", rows))) <= rows
