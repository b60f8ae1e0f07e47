"""Word timestamps: the arithmetic against transformers', and Whisper's answers with timestamps of words."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from openai.types.audio import TranscriptionVerbose

from server.render.load_tokenizer import load_tokenizer
from server.speech.words import aligned, split, warped, words_of
from tests.server.conftest import config_of, maker, ready
from tests.server.speech.test_audio import DIGITS, send
from tests.server.speech.test_whisper import features, prompt, recording
from tests.tiny_hearing import FIRST, oracle, whisper

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def hearing():
    async with ready(config_of(model={"model": str(whisper()), "num_threads": 1})) as state:
        yield state


@pytest.fixture
def client(hearing, monkeypatch):
    monkeypatch.setattr("server.speech.whisper.TEMPERATURES", (0.0,))
    return maker(hearing)()


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (7, 3), (12, 40), (40, 41)])
async def test_the_path_is_transformers(shape):
    from transformers.models.whisper.generation_whisper import _dynamic_time_warping

    costs = np.random.default_rng(sum(shape)).normal(size=shape)
    for mine, theirs in zip(warped(costs), _dynamic_time_warping(costs)):
        assert np.array_equal(mine, theirs)


@pytest.mark.parametrize(("rows", "smooth"), [(50, 7), (50, 3), (3, 7), (20, 1)])
async def test_weights_are_normalised_and_smoothed_as_transformers_does(rows, smooth):
    from transformers.models.whisper.generation_whisper import _median_filter

    weights = torch.rand(3, 9, rows, generator=torch.Generator().manual_seed(rows)).softmax(-1)
    normal = (weights - weights.mean(-2, keepdim=True)) / weights.std(-2, keepdim=True, unbiased=False)
    theirs = _median_filter(normal, smooth).mean(0).numpy()
    assert np.abs(aligned(weights.numpy(), smooth) - theirs).max() < 1e-4


@pytest.mark.parametrize("language", ["en", "ja"])
@pytest.mark.parametrize(
    "text",
    [" The cat, and (the) dog: it's on!", 'over and "under" ... ¿no?', " für Äpfel 中文。好", " a", "?!", " - the ("],
)
async def test_words_are_split_as_transformers_does(text, language):
    from transformers.models.whisper.tokenization_whisper import _combine_tokens_into_words

    tokenizer = load_tokenizer(whisper())
    ids = tokenizer.encode(text)
    theirs = SimpleNamespace(eos_token_id=FIRST, decode=lambda ids, **_: tokenizer.decode(ids))
    _, wanted, _ = _combine_tokens_into_words(theirs, list(ids), {"en": "english", "ja": "japanese"}[language])
    assert split(ids, tokenizer.decode, language) == wanted


def known(client: Any, tokens: list[int], language: str, seconds: float) -> list[dict[str, Any]]:
    """The words of a window, with times from transformers' attention."""
    ids = [*prompt(language), *tokens]
    with torch.inference_mode():
        made = oracle()(features(), decoder_input_ids=torch.tensor([ids]), output_attentions=True)
    heads = client.state.whisper.alignment_heads
    weights = torch.stack([made.cross_attentions[layer][0, head] for layer, head in heads]).numpy()
    weights = weights[:, len(ids) - len(tokens) - 1 :, : int(seconds * 50)]
    words = words_of(tokens, weights, client.state.tokenizer.decode, language, 7)
    return [{"word": word.text, "start": round(word.start, 3), "end": round(word.end, 3)} for word in words]


async def test_whisper_returns_the_times_of_words(client):
    asked = {"language": "de", "response_format": "verbose_json", "max_completion_tokens": 30}
    reply = await send(client, recording(), timestamp_granularities="word", **asked)
    assert reply.status == 200, reply.content
    body = reply.json()
    assert "segments" not in body
    assert "".join(word["word"] for word in body["words"]).replace(" ", "") == body["text"].replace(" ", "")
    for word in body["words"]:
        assert 0 <= word["start"] <= word["end"] <= body["duration"]
    both = (await send(client, recording(), timestamp_granularities=["word", "segment"], **asked)).json()
    tokens = [token for part in both["segments"] for token in part["tokens"] if token < FIRST]
    assert both["words"] == body["words"] == known(client, tokens, "de", 1.5)
    assert len(TranscriptionVerbose.model_validate(both).words) == len(body["words"])
    plain = (await send(client, recording(), **asked)).json()
    assert "words" not in plain


async def test_words_of_later_windows_count_from_the_recordings_beginning(client):
    reply = await send(
        client,
        recording(5.0),
        language="en",
        response_format="verbose_json",
        max_completion_tokens=12,
        timestamp_granularities=["word", "segment"],
    )
    starts = [word["start"] for word in reply.json()["words"]]
    assert starts == sorted(starts)
    assert starts[0] < 2 < 4 < starts[-1] <= 5


async def test_silence_has_no_words(client):
    assert words_of([], np.zeros((2, 1, 9)), client.state.tokenizer.decode, "en", 7) == []
    assert words_of([40], np.zeros((2, 2, 0)), client.state.tokenizer.decode, "en", 7) == []


async def test_tokens_beyond_the_decoders_context_have_no_times(client):
    ids = client.state.tokenizer.encode(" the on the")
    weights = np.random.default_rng(0).random((2, len(ids), 30))  # one row too few
    words = words_of(ids, weights, client.state.tokenizer.decode, "en", 7)
    assert "".join(word.text for word in words) == client.state.tokenizer.decode(ids[:-1]).replace(" ", "")


async def test_a_model_without_times_of_words_refuses_them(serve):
    reply = await send(serve(), DIGITS, response_format="verbose_json", timestamp_granularities="word")
    assert reply.status == 501
    assert "this model has times of segments only" in reply.error["message"]
