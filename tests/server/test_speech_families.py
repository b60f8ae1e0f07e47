"""Transcription by families with a form of their own: what each is asked about a window, and what becomes its text."""

from __future__ import annotations

import json
import shutil
from typing import Any

import numpy as np
import pytest

from tests import tiny
from tests.mm import made
from tests.server.conftest import config_of, maker, ready
from tests.server.render import tekken
from tests.server.test_audio import TRANSLATIONS, send
from tests.tiny_sounds import SECONDS, SOUNDS

ROWS = SECONDS * 50 // 4  # of a window
FAMILY = {family.name: family for family in SOUNDS}


def recording(seconds: float = 1.5) -> bytes:
    samples = np.random.default_rng(0).normal(0, 0.1, int(16000 * seconds)).astype(np.float32)
    return made.sound(samples[None], 16000, "wav", "pcm_f32le")


def watched(state: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Requests that reach the engine."""
    seen: list[Any] = []
    submit = state.engine.submit
    monkeypatch.setattr(state.engine, "submit", lambda request: seen.append(request) or submit(request))
    return seen


def asked_of(request: Any, audio: int) -> list[int]:
    """The prompt, the sound as one token."""
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


async def test_glm_asr_is_asked_in_the_words_of_its_training(monkeypatch):
    folder = FAMILY["glm-asr"].folder
    async with ready(config_of(model={"model": str(folder), "num_threads": 1})) as state:
        seen = watched(state, monkeypatch)
        client = maker(state)(model={"model": str(folder)})
        reply = await send(client, recording(), max_completion_tokens=4, response_format="verbose_json")
        assert reply.status == 200, reply.content
        text = state.tokenizer.decode(asked_of(seen[-1], tiny.IDS["<|AUDIO|>"]))
        assert "<|AUDIO|><|audio_eos|>Please transcribe this audio into text<|im_end|>" in text
