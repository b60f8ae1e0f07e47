"""Vision families over HTTP: a picture in a chat changes the answer; unsupported media are refused."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from tests import tiny
from tests.mm.made import data_url, film, noise, picture, ramp, sound
from tests.server.conftest import config_of, maker, ready
from tests.tiny_sounds import SOUNDS

pytest.importorskip("av")
PICTURE = {"type": "image_url", "image_url": {"url": data_url(picture(noise(60, 90, 1), "PNG"), "image/png")}}
OTHER = {"type": "image_url", "image_url": {"url": data_url(picture(noise(60, 90, 2), "PNG"), "image/png")}}
BROKEN = {"type": "image_url", "image_url": {"url": data_url(picture(noise(60, 90, 1), "PNG")[:99], "image/png")}}
FILM = {"type": "video_url", "video_url": {"url": data_url(film(ramp(20)), "video/mp4")}}
WORDS = {"type": "text", "text": "What is it?"}
GREEDY = {"max_tokens": 6, "temperature": 0}
WIDTHS = {
    "qwen2_vl": 2 * 3,
    "qwen3_vl": 2 * 3,
    "qwen3_5": 2 * 3,
    "llava": 16,
    "mistral3": 3 * 4,
    "internvl": 4 * 4,
    "idefics3": 7 * 4,
    "gemma3-vision": 16,
    "gemma4-vision": 3 * 4,
    "llama4-vision": 5 * 4,
    "paligemma": 16,
    "glm4v": 2 * 3,
    "llava_onevision": 16,
    "lfm2_vl": 6,
}  # rows of PICTURE


def body(*parts):
    return {"messages": [{"role": "user", "content": [*parts, WORDS]}], "max_tokens": 6, "temperature": 0}


@pytest.mark.parametrize("name", WIDTHS)
async def test_pictures_are_seen(name):
    async with ready(config_of(model={"model": str(tiny.checkpoint(name)), "num_threads": 1})) as state:
        client = maker(state)()

        async def ask(*parts, status=200):
            answer = await client.post("/v1/chat/completions", json={**body(*parts), "logprobs": True})
            assert answer.status == status, answer.json()
            return answer.json()

        first, other = await ask(PICTURE), await ask(OTHER)
        assert first["choices"][0]["logprobs"] != other["choices"][0]["logprobs"]
        again = await ask(PICTURE)
        assert again["choices"] == first["choices"]
        plain = await ask()
        two = await ask(PICTURE, OTHER)
        none, one, both = (answer["usage"]["prompt_tokens"] for answer in (plain, first, two))
        each = one - none
        if name == "llava_onevision":  # with another picture it is one tile and a newline; alone it is three tiles
            each, one = each - 27, one - 27
        assert both - one == each >= WIDTHS[name] + 2
        assert (await ask(BROKEN, status=400))["error"]["reason"] == "media_invalid"
        if "video" in state.engine.model.modalities:
            assert (await ask(FILM, PICTURE))["usage"]["prompt_tokens"] > one
        else:
            assert (await ask(FILM, status=400))["error"]["reason"] == "media_unsupported"


async def test_crops_of_gemma_stand_in_the_prompt_with_the_words_of_its_processor():
    """Two pictures, one long, rendered and answered; the processor's text is tokenized with the text before it."""
    long = {"type": "image_url", "image_url": {"url": data_url(picture(noise(260, 600, 3), "PNG"), "image/png")}}
    served = {"model": str(tiny.checkpoint("gemma3-vision")), "num_threads": 1}
    async with ready(config_of(model=served, chat={"mm_processor_kwargs": {"do_pan_and_scan": True}})) as state:
        client = maker(state)()
        asked = {"messages": [{"role": "user", "content": [WORDS, long, PICTURE]}], "max_tokens": 4, "temperature": 0}
        rendered = (await client.post("/v1/chat/completions/render", json=asked)).json()
        text = state.tokenizer.decode(rendered["token_ids"])
        shown = "<|IMAGE|>" + 16 * "<|vision_pad|>" + "<|audio_eos|>"
        led = f"{WORDS['text']}<|vision_bos|>Here is the original image {shown}"
        crops = f"\n\n and here are some crops to help you see better \n\n{shown}\n\n \n\n{shown}<|vision_eos|>"
        assert f"{led}{crops}<|vision_bos|>{shown}<|vision_eos|>" in text
        assert (await client.post("/v1/chat/completions", json=asked)).status == 200


async def test_gemma4_reads_pictures_films_and_sounds_of_one_prompt():
    """Every item is in its place; a film's frames follow their times; the rendered ids generate the chat's answer."""
    samples = np.random.default_rng(0).normal(0, 0.1, (1, 8000)).astype(np.float32)
    wav = base64.b64encode(sound(samples, 16000)).decode()
    heard = {"type": "input_audio", "input_audio": {"data": wav, "format": "wav"}}
    (gemma4,) = (family for family in SOUNDS if family.name == "gemma4-audio")
    async with ready(config_of(model={"model": str(gemma4.folder), "num_threads": 1})) as state:
        client = maker(state)()
        asked = {**body(FILM, heard, PICTURE), "logprobs": True, "return_token_ids": True}
        rendered = (await client.post("/v1/chat/completions/render", json=asked)).json()
        text = state.tokenizer.decode(rendered["token_ids"])
        begin, end = "<|audio_bos|>", "<|audio_eos|>"  # the checkpoint's tokens around every item
        frame = begin + 12 * "<|VIDEO|>" + end
        assert f"00:00 {frame} 00:00 {frame} 00:01 {frame}" in text
        assert begin + 13 * "<|AUDIO|>" + end in text
        assert begin + 12 * "<|IMAGE|>" + end in text
        assert sorted(rendered["features"]["mm_hashes"]) == ["audio", "image", "video"]
        whole = (await client.post("/v1/chat/completions", json=asked)).json()
        again = (await client.post("/inference/v1/generate", json={**rendered, "sampling_params": GREEDY})).json()
        assert again["choices"][0]["token_ids"] == whole["choices"][0]["token_ids"]
        other = base64.b64encode(sound(-2 * samples, 16000)).decode()
        loud = {**heard, "input_audio": {"data": other, "format": "wav"}}
        changed = {**asked, **body(FILM, loud, PICTURE)}
        answer = (await client.post("/v1/chat/completions", json=changed)).json()
        assert answer["choices"][0]["logprobs"] != whole["choices"][0]["logprobs"]


async def test_a_model_that_runs_through_transformers_takes_audio():
    """Another sound changes the answer; a picture is refused."""
    async with ready(
        config_of(model={"model": str(tiny.checkpoint("moss_transcribe_diarize")), "num_threads": 1})
    ) as state:
        client = maker(state)()
        answers = []
        for gain in (1, -2, 1):
            samples = gain * np.random.default_rng(0).normal(0, 0.1, (1, 30000)).astype(np.float32)
            data = base64.b64encode(sound(samples, 16000)).decode()
            heard = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
            reply = await client.post("/v1/chat/completions", json={**body(heard), "logprobs": True})
            assert reply.status == 200, reply.json()
            answers.append(reply.json()["choices"][0]["logprobs"])
        assert answers[0] == answers[2] != answers[1]
        refused = await client.post("/v1/chat/completions", json=body(PICTURE))
        assert (refused.status, refused.json()["error"]["reason"]) == (400, "media_unsupported")


async def test_without_a_tokenizer_internvl_starts_and_reads_pictures_alone():
    """Without the tokenizer, the token of films and the text around pictures are unknown."""
    served = {"model": str(tiny.checkpoint("internvl")), "num_threads": 1, "skip_tokenizer_init": True}
    async with ready(config_of(model=served)) as state:
        assert state.media.processor.modalities == {"image"}
