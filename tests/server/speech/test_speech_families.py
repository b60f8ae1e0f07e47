"""Transcription by families with their own formats: the prompt for a window, and the text taken from the answer."""

from __future__ import annotations

import base64
import json
import shutil
from typing import Any

import numpy as np
import pytest

from tests import tiny, tiny_realtime
from tests.engine_kit import answer
from tests.mm import made
from tests.server.conftest import config_of, maker, ready
from tests.server.render import tekken
from tests.server.scripted import Script
from tests.server.speech.test_audio import TRANSLATIONS, send
from tests.server.speech.test_realtime import Socket
from tests.tiny_sounds import SECONDS, SOUNDS

ROWS = SECONDS * 50 // 4  # rows of a window
FAMILY = {family.name: family for family in SOUNDS}


def recording(seconds: float = 1.5) -> bytes:
    samples = np.random.default_rng(0).normal(0, 0.1, int(16000 * seconds)).astype(np.float32)
    return made.sound(samples[None], 16000, "wav", "pcm_f32le")


def watched(state: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A list of the requests that the engine gets."""
    seen: list[Any] = []
    submit = state.engine.submit
    monkeypatch.setattr(state.engine, "submit", lambda request: seen.append(request) or submit(request))
    return seen


def asked_of(request: Any, audio: int) -> list[int]:
    """The prompt, with all audio rows shortened to one token."""
    ids = request.prompt_token_ids.tolist()
    first = ids.index(audio)
    rows = ids.count(audio)
    assert ids[first : first + rows] == [audio] * rows
    return [*ids[: first + 1], *ids[first + rows :]]


async def test_voxtral_writes_down_behind_its_own_marker(tmp_path, monkeypatch):
    folder = tmp_path / "voxtral"
    shutil.copytree(FAMILY["voxtral"].folder, folder, ignore=shutil.ignore_patterns("tokenizer*", "chat_template*"))
    tekken.write_tekken(folder, "v13", image=False, audio=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "audio_token_id": tekken.SPECIAL.index("[AUDIO]")}))
    async with ready(config_of(model={"model": str(folder), "num_threads": 1})) as state:
        seen = watched(state, monkeypatch)
        client = maker(state)(model={"model": str(folder)})
        audio = tekken.SPECIAL.index("[AUDIO]")
        reply = await send(client, recording(), language="de", max_completion_tokens=4)
        assert reply.status == 200, reply.content
        text = state.tokenizer.decode(asked_of(seen[-1], audio))
        assert text == "<s>[INST][BEGIN_AUDIO][AUDIO][/INST]lang:de[TRANSCRIBE]"
        assert state.tokenizer.id_of("[TRANSCRIBE]") == seen[-1].prompt_token_ids[-1]
        assert seen[-1].prompt_token_ids.tolist().count(audio) == ROWS
        await send(client, recording(), max_completion_tokens=4)
        text = state.tokenizer.decode(asked_of(seen[-1], audio))
        assert text == "<s>[INST][BEGIN_AUDIO][AUDIO][/INST][TRANSCRIBE]"
        reply = await send(client, recording(), path=TRANSLATIONS, max_completion_tokens=4)
        assert reply.status == 200, reply.content
        text = state.tokenizer.decode(asked_of(seen[-1], audio))
        assert text == "<s>[INST][BEGIN_AUDIO][AUDIO]Translate the recording into English.[/INST]"


@pytest.fixture
async def realtime():
    """The state and a client of a server with a tiny Voxtral Realtime."""
    folder = str(tiny_realtime.folder())
    async with ready(config_of(model={"model": folder, "num_threads": 1})) as state:
        yield state, maker(state)(model={"model": folder})


async def test_voxtral_realtime_writes_a_token_for_each_part_of_the_sound(realtime, monkeypatch):
    state, client = realtime
    seen = watched(state, monkeypatch)
    reply = await send(client, recording(), language="de")
    assert reply.status == 200, reply.content
    (request,) = seen
    text = state.tokenizer.decode(request.prompt_token_ids.tolist())
    assert text == "<s>" + "[STREAMING_PAD]" * (tiny_realtime.BEFORE + tiny_realtime.DELAY)
    ((_, rows),) = request.media[0].spans
    assert rows == tiny_realtime.BEFORE + -(-24000 // 1280) + tiny_realtime.DELAY + 11
    ((ids,), text) = await answer(state.engine, request), reply.json()["text"]
    assert 1 < len(ids) <= rows - len(request.prompt_token_ids)
    assert text == state.tokenizer.decode(ids, skip_special_tokens=True).strip() != ""
    streamed = await send(client, recording(), stream=True)
    assert streamed.events()[-2]["text"] == text
    plain = await send(client, recording(), response_format="text")
    assert plain.content.decode().strip() == text


async def test_voxtral_realtime_transcribes_what_a_session_commits(realtime):
    _, client = realtime
    socket = Socket(client)
    await socket.opened(turn_detection=None)
    socket.append(np.random.default_rng(0).normal(0, 0.1, 24000).astype(np.float32))
    socket.say("input_audio_buffer.commit")
    await socket.next("input_audio_buffer.committed")
    said = await socket.next("conversation.item.input_audio_transcription.completed")
    assert said["transcript"]
    await socket.leave()


async def test_voxtral_realtime_refuses_what_it_cannot_be_asked(realtime):
    _, client = realtime
    for fields, words in (
        ({"path": TRANSLATIONS}, "does not translate"),
        ({"prompt": "Omniloop"}, "takes audio and no text"),
    ):
        refused = await send(client, recording(), **fields)
        assert refused.status == 501
        assert words in refused.json()["error"]["message"]
    sound = {"data": base64.b64encode(recording()).decode(), "format": "wav"}
    for content, words in (
        ("hello", "send them to /v1/audio/transcriptions"),
        ([{"type": "input_audio", "input_audio": sound}], "send recordings to /v1/audio/transcriptions"),
    ):
        refused = await client.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}]})
        assert refused.status == 400
        assert words in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("glm-asr", "Please transcribe this audio into text"),
        ("granite-speech", "can you transcribe the speech into a written format?"),
        ("phi4mm", "Transcribe the audio clip into text."),
        ("ultravox", ""),
    ],
)
async def test_models_are_asked_in_the_words_of_their_training(monkeypatch, name, asked):
    folder = FAMILY[name].folder
    async with ready(config_of(model={"model": str(folder), "num_threads": 1})) as state:
        seen = watched(state, monkeypatch)
        client = maker(state)(model={"model": str(folder)})
        reply = await send(client, recording(), max_completion_tokens=4, response_format="verbose_json")
        assert reply.status == 200, reply.content
        text = state.tokenizer.decode(asked_of(seen[-1], tiny.IDS["<|AUDIO|>"]))
        assert f"<|AUDIO|><|audio_eos|>{asked}" in text


@pytest.mark.parametrize(("name", "longest"), [("fun-audio", 5), ("gemma4-audio", 30)])
async def test_windows_are_no_longer_than_the_model_takes(monkeypatch, name, longest):
    folder = FAMILY[name].folder
    async with ready(config_of(model={"model": str(folder), "num_threads": 1})) as state:
        client = maker(state)(model={"model": str(folder)}, speech={"transcription_window": 60.0})
        reply = await send(client, recording(32), max_completion_tokens=2, response_format="verbose_json")
        assert reply.status == 200, reply.content
        lengths = [part["end"] - part["start"] for part in reply.json()["segments"]]
        assert 0 < max(lengths) <= longest


@pytest.fixture
async def qwen3_asr(tmp_path, monkeypatch):
    """A server whose tokenizer has the model's mark <asr_text>."""
    folder = tmp_path / "qwen3-asr"
    shutil.copytree(FAMILY["qwen3-asr"].folder, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (word,) = (entry for entry in tokenizer["added_tokens"] if entry["content"] == "<|vision_pad|>")
    word["content"] = "<asr_text>"
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    async with ready(config_of(model={"model": str(folder), "num_threads": 1})) as state:
        yield state, maker(state)(model={"model": str(folder)}), watched(state, monkeypatch)


async def test_qwen3_asr_goes_on_behind_the_language_that_the_client_names(qwen3_asr):
    state, client, seen = qwen3_asr
    reply = await send(client, recording(), language="de", prompt="Omniloop", response_format="verbose_json")
    assert reply.status == 200, reply.content
    (request,) = seen
    text = state.tokenizer.decode(asked_of(request, tiny.IDS["<|AUDIO|>"]))
    assert text.startswith("<|im_start|>system\nOmniloop<|im_end|>\n<|im_start|>user\n<|audio_bos|><|AUDIO|>")
    assert text.endswith("<|im_start|>assistant\nlanguage German<asr_text>")
    assert state.tokenizer.id_of("<asr_text>") == request.prompt_token_ids[-1]
    assert reply.json()["language"] == "german"
    for fields, words in (({"language": "eo"}, "ISO 639-1"), ({"language": "la"}, "this model transcribes ar, cs")):
        refused = await send(client, recording(), **fields)
        assert refused.status == 400
        assert words in refused.json()["error"]["message"]
    refused = await send(client, recording(), path=TRANSLATIONS)
    assert refused.status == 501
    assert "does not translate" in refused.json()["error"]["message"]


async def test_qwen3_asr_is_asked_for_the_language_first(qwen3_asr):
    state, client, _ = qwen3_asr
    script = client.state.engine = Script(state.engine, state.tokenizer, ["language French", "bonjour"], 4)
    reply = await send(client, recording(), response_format="verbose_json")
    assert (reply.json()["language"], reply.json()["text"]) == ("french", "bonjour")
    asked = script.requests
    first, second = (state.tokenizer.decode(asked_of(request, tiny.IDS["<|AUDIO|>"])) for request in asked)
    assert first.endswith("<|im_start|>assistant\n")
    assert second == first + "language French<asr_text>"
    assert state.tokenizer.id_of("<asr_text>") in asked[0].sampling.stop_token_ids


async def test_qwen3_asr_that_detects_no_speech_gives_an_empty_text(qwen3_asr):
    state, client, _ = qwen3_asr
    script = client.state.engine = Script(state.engine, state.tokenizer, ["language None", ""], 4)
    reply = await send(client, recording(), stream=True)
    assert reply.events()[-2]["text"] == ""
    assert state.tokenizer.decode(script.requests[1].prompt_token_ids).endswith("language None<asr_text>")
