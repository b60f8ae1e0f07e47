"""Servers without some parts: --skip-tokenizer-init, --language-model-only, --limit-mm-per-prompt image=0."""

from __future__ import annotations

import pytest
import pytest_asyncio

from server.app import make_app
from server.start.load import log_vocabularies
from tests import tiny
from tests.server.asgi import Client
from tests.server.conftest import config_of, ready

pytestmark = pytest.mark.asyncio(loop_scope="session")

IDS = [40, 41, 42]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def bare():
    """A client of a server without tokenizer and towers; its model has both."""
    model = {"model": str(tiny.checkpoint("omni")), "num_threads": 1}
    flags = {"skip_tokenizer_init": True, "language_model_only": True, "hf_overrides": {"eos_token_id": 7}}
    async with ready(config_of(model={**model, **flags})) as state:
        yield Client(make_app(state))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def text_only():
    model = {"model": str(tiny.checkpoint("omni")), "num_threads": 1, "language_model_only": True}
    async with ready(config_of(model=model)) as state:
        yield Client(make_app(state))


async def test_ids_in_and_ids_out(bare):
    body = {"prompt": IDS, "max_tokens": 4, "temperature": 0, "return_token_ids": True, "logprobs": 1}
    answer = (await bare.post("/v1/completions", body)).json()
    choice = answer["choices"][0]
    assert len(choice["token_ids"]) == 4
    assert choice["text"] == ""
    sampling = {"max_tokens": 4, "temperature": 0}
    other = (await bare.post("/inference/v1/generate", {"token_ids": IDS, "sampling_params": sampling})).json()
    assert other["choices"][0]["token_ids"] == choice["token_ids"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "text"}, "prompt"),
        ("/v1/completions", {"prompt": IDS, "stop": ["x"]}, "stop"),
        ("/v1/completions", {"prompt": IDS, "bad_words": ["x"]}, "bad_words"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, "messages"),
        ("/tokenize", {"prompt": "x"}, "prompt"),
        ("/detokenize", {"tokens": IDS}, "tokens"),
        ("/inference/v1/generate", {"token_ids": IDS, "output_mode": "text"}, "output_mode"),
    ],
)
async def test_texts_are_refused_by_name(bare, path, body, param):
    reply = await bare.post(path, body)
    assert reply.status == 400, reply
    error = reply.json()["error"]
    assert error["reason"] == "no_tokenizer"
    assert error["message"].startswith(f"{param} needs a tokenizer")
    assert "/inference/v1/generate" in error["message"]


async def test_a_model_without_its_towers_takes_text(text_only):
    answer = await text_only.post(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    )
    assert answer.status == 200
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    refused = await text_only.post("/v1/chat/completions", {"messages": [{"role": "user", "content": [picture]}]})
    assert refused.status == 400
    assert "takes no image input; it takes: text" in refused.json()["error"]["message"]


async def test_a_tokenizer_that_knows_more_than_the_model_is_logged(caplog):
    log_vocabularies(320, 320)
    assert not caplog.records
    log_vocabularies(324, 320)
    assert (
        "the tokenizer has ids up to 323 and the model has 320 tokens: prompts with other ids are refused"
        in caplog.text
    )
