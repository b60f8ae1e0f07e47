"""Whisper on the transcription routes, with a tiny random checkpoint: its prompts and rules."""

from __future__ import annotations

import zlib
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from server.speech.timed import timed
from tests.mm import made
from tests.server.conftest import config_of, maker, ready
from tests.server.speech.test_audio import TRANSLATIONS, send
from tests.tiny_hearing import CONTEXT, FIRST, IDS, LANGUAGES, SPACE, SUPPRESSED, oracle, whisper

pytestmark = pytest.mark.asyncio(loop_scope="session")

START, END = IDS["<|startoftranscript|>"], IDS["<|endoftext|>"]
WINDOW = 128  # tokens of a window


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def hearing():
    async with ready(config_of(model={"model": str(whisper()), "num_threads": 1})) as state:
        yield state


@pytest.fixture
def client(hearing):
    return maker(hearing)()


@pytest.fixture
def asked(client, monkeypatch):
    """A list of the requests that the engine gets."""
    seen: list[Any] = []
    submit = client.state.engine.submit
    monkeypatch.setattr(client.state.engine, "submit", lambda request: seen.append(request) or submit(request))
    return seen


def noise(seconds: float = 1.5) -> np.ndarray:
    return np.random.default_rng(0).normal(0, 0.1, int(16000 * seconds)).astype(np.float32)


def recording(seconds: float = 1.5) -> bytes:
    return made.sound(noise(seconds)[None], 16000, "wav", "pcm_f32le")


def texts_of(requests: list[Any]) -> list[list[int]]:
    """The tokens after the window in each request's prompt."""
    return [request.prompt_token_ids[WINDOW:].tolist() for request in requests]


def prompt(language: str, task: str = "transcribe") -> list[int]:
    return [START, IDS[f"<|{language}|>"], IDS[f"<|{task}|>"], IDS["<|notimestamps|>"]]


def features() -> torch.Tensor:
    from transformers import WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor.from_pretrained(whisper())
    # The server reads 16-bit and float files alike; this file has floats.
    return extractor(noise(), sampling_rate=16000, return_tensors="pt").input_features


def logprobs(ids: list[int]) -> torch.Tensor:
    """transformers' log-probabilities of the token after each of these tokens, [len(ids), vocab]."""
    with torch.inference_mode():
        return oracle()(features(), decoder_input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)


async def test_tokens_equal_transformers_generate(client):
    with torch.inference_mode():
        ids = oracle().generate(features(), language="de", task="transcribe", do_sample=False, max_new_tokens=40)
    theirs = [token for token in ids[0].tolist() if token < FIRST]
    assert len(theirs) > 8
    reply = await send(client, recording(), language="de", stream=True, max_completion_tokens=40)
    assert reply.events()[-2]["text"] == client.state.tokenizer.decode(theirs).strip()


async def test_the_numbers_of_a_segment_are_the_references(client):
    reply = await send(
        client,
        recording(),
        language="en",
        response_format="verbose_json",
        temperature=0.7,
        seed=3,
        max_completion_tokens=9,
    )
    segments = reply.json()["segments"]
    segment, ids = segments[0], prompt("en")[:-1]
    tokens = [token for part in segments for token in part["tokens"]]
    assert len(tokens) == 9
    lines = logprobs([*ids, *tokens])
    chosen = sum(float(lines[len(ids) - 1 + at, token]) for at, token in enumerate(tokens))
    assert segment["avg_logprob"] == pytest.approx(chosen / (len(tokens) + 1), abs=1e-3)
    assert segment["no_speech_prob"] == pytest.approx(float(logprobs([START])[0, IDS["<|nospeech|>"]].exp()), abs=1e-5)
    text = reply.json()["text"].encode()
    assert segment["compression_ratio"] == len(text) / len(zlib.compress(text))
    assert segment["temperature"] == 0.7


async def test_segments_have_the_times_that_the_model_writes(client, monkeypatch):
    monkeypatch.setattr("server.speech.whisper.TEMPERATURES", (0.0,))
    reply = await send(client, recording(5.0), language="de", response_format="verbose_json", max_completion_tokens=40)
    segments = reply.json()["segments"]
    assert len(segments) >= 3
    for before, segment in pairwise(segments):
        assert before["start"] <= before["end"] <= segment["start"] + 1e-3
    for segment in segments:
        first = segment["tokens"][0]
        if first >= IDS["<|0.00|>"]:
            offset = segment["seek"] / 100 + (first - IDS["<|0.00|>"]) * 0.02
            assert segment["start"] == pytest.approx(min(offset, segment["end"]), abs=1e-3)
    srt = await send(client, recording(5.0), language="de", response_format="srt", max_completion_tokens=40)
    assert srt.content.decode().count("-->") == len(segments)


T0 = IDS["<|0.00|>"]


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        ([T0, 40, 41, T0 + 50, T0 + 60, 42, T0 + 90], [(0.0, 1.0, [40, 41]), (1.2, 1.8, [42])]),
        ([T0 + 5, 40, T0 + 50, T0 + 50, 41, 42], [(0.1, 1.0, [40]), (1.0, 2.0, [41, 42])]),
        ([T0, 40, T0 + 50, T0 + 50], [(0.0, 1.0, [40])]),
        ([T0, 40], [(0.0, 2.0, [40])]),
        ([40, 41], [(0.0, 2.0, [40, 41])]),
        ([T0], []),
        ([T0, 40, T0 + 99], [(0.0, 1.98, [40])]),
    ],
)
async def test_a_windows_text_is_cut_between_times_and_none_of_it_is_lost(tokens, found):
    pieces = timed(tokens, T0, 2.0)
    got = [(piece.start, piece.end, [token for token in piece.token_ids if token < T0]) for piece in pieces]
    assert [(pytest.approx(a), pytest.approx(b), ids) for a, b, ids in found] == got


async def test_the_language_is_detected_once_where_no_request_names_it(client, asked):
    reply = await send(client, recording(5.0), stream=True, max_completion_tokens=4)
    assert reply.status == 200
    line = logprobs([START])[0]
    heard = max(LANGUAGES, key=lambda code: float(line[IDS[f"<|{code}|>"]]))
    first, *others = texts_of(asked)
    assert first == [START]
    assert len(others) >= 3
    assert {tuple(ids) for ids in others} == {tuple(prompt(heard))}
    verbose = await send(client, recording(), response_format="verbose_json", max_completion_tokens=4, temperature=1)
    names = {"en": "english", "de": "german", "ja": "japanese"}
    assert verbose.json()["language"] == names[heard]


async def test_prompts_tasks_and_rules_are_whispers(client, asked):
    await send(client, recording(), language="ja", prompt=" " + "on and " * 40, temperature=1, max_completion_tokens=2)
    await send(client, recording(), path=TRANSLATIONS, language="de", temperature=1, max_completion_tokens=2)
    listened, heard, _, translated = texts_of(asked)
    assert heard[: -len(prompt("ja")) + 1] == listened
    assert listened[0] == IDS["<|startofprev|>"]
    assert len(listened) == CONTEXT // 2 + 1, "the end of the prompt, and two markers"
    assert heard[-4:] == prompt("ja")
    assert translated == prompt("de", "translate")
    rules = asked[1].sampling
    assert rules.bad_words == tuple((token,) for token in SUPPRESSED)
    assert rules.not_first_token_ids == (SPACE, END)


async def test_a_text_that_the_model_doubts_is_drawn_again_warmer(client, asked):
    verbose = {"response_format": "verbose_json", "max_completion_tokens": 4, "seed": 7}  # this seed gives a text
    reply = await send(client, recording(), language="en", **verbose)
    assert [request.sampling.temperature for request in asked[1:]] == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert reply.json()["segments"][0]["temperature"] == 1.0
    asked.clear()
    await send(client, recording(), language="en", temperature=0.3, max_completion_tokens=4)
    assert [request.sampling.temperature for request in asked[1:]] == [0.3]


async def test_a_window_that_sounds_silent_and_is_doubted_says_nothing(client, monkeypatch):
    monkeypatch.setattr("server.speech.whisper.MAX_NO_SPEECH_PROB", -1.0)
    reply = await send(client, recording(), language="en", max_completion_tokens=4)
    assert reply.json()["text"] == ""


@pytest.mark.parametrize(
    ("path", "fields", "status", "param"),
    [
        ("/v1/audio/transcriptions", {"language": "fr"}, 400, "language"),
        (TRANSLATIONS, {"to_language": "de"}, 501, "to_language"),
    ],
)
async def test_what_whisper_cannot_do_is_refused(client, path, fields, status, param):
    reply = await send(client, recording(), path=path, **fields)
    assert (reply.status, reply.error["param"]) == (status, param)


async def test_prompts_without_sound_are_refused_in_plain_words(client):
    reply = await client.post("/v1/completions", {"prompt": "hello", "max_tokens": 4})
    assert (reply.status, reply.error["reason"]) == (400, "sound_required")
    assert "/v1/audio/transcriptions" in reply.error["message"]


async def test_log_probabilities_are_returned_for_the_tokens_of_the_text(client):
    reply = await send(client, recording(), language="en", temperature=0.7, seed=3, **{"include[]": "logprobs"})
    told = reply.json()
    assert b"".join(bytes(each["bytes"]) for each in told["logprobs"]).decode(errors="replace").strip() == told["text"]
    assert told["text"]
    assert len({each["logprob"] for each in told["logprobs"]}) > 1
    assert all(each["logprob"] < 0 for each in told["logprobs"])
