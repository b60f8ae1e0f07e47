"""Routes for vectors, scores and decisions give one rank's numbers on two ranks."""

from __future__ import annotations

import numpy as np
import pytest

from server.app import make_app
from tests import pooling_kit as kit
from tests import tiny
from tests.asked_vectors import DOCUMENTS, FEW, QUERY, scores, vectors
from tests.server.asgi import Client
from tests.server.conftest import config_of, ready

pytestmark = pytest.mark.asyncio(loop_scope="session")
QUESTIONS = {
    "kind": {"type": "choice", "instructions": "What is it?", "criteria": {"A": "a parcel", "B": None}},
    "urgent": {"type": "score", "instructions": "How urgent?", "criteria": ["low", "middle", "high"]},
}
PAIR = {"query": "Is it a cat? ", "items": ["A cat.", "A dog, no more."], "label_token_ids": [40, 41, 77]}
WIDE = {"max_num_seqs": 16, "max_num_queued_reqs": 64}


async def on_both(folder, ask):
    """What `ask(client)` gives on one rank and on two."""
    found = []
    for ranks in (1, 2):
        model, split = {"model": str(folder), "num_threads": 1}, {"tensor_parallel_size": ranks}
        async with ready(config_of(model=model, scheduler=WIDE, ranks=split)) as state:
            found.append(await ask(Client(make_app(state))))
    return found


def numbers(value):
    """All floats of an answer, in its order."""
    if isinstance(value, float):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [number for each in inner for number in numbers(each)]


async def test_decisions_scores_and_prompt_log_probabilities_of_a_generating_model():
    prompt = {"prompt": FEW[0], "max_tokens": 3, "logprobs": 2, "echo": True, "temperature": 0, "ignore_eos": True}

    async def ask(client):
        answers = []
        for path, body in (
            ("/v1/systemone", {"state": "A parcel is lost. ", "questions": QUESTIONS}),
            ("/v1/score", PAIR),
            ("/v1/completions", prompt),
        ):
            reply = await client.post(path, body)
            assert reply.status == 200, reply.content
            answers.append(numbers({key: each for key, each in reply.json().items() if key != "timings"}))
        assert (await client.post("/v1/embeddings", {"input": "a"})).status == 501
        return answers

    for one, two in zip(*await on_both(tiny.checkpoint("qwen3"), ask), strict=True):
        assert len(one) > 2
        np.testing.assert_allclose(two, one, rtol=0, atol=1e-4)


async def test_vectors_and_scores_of_an_encoder():
    async def ask(client):
        tokens = await client.post("/pooling", {"input": FEW[:2], "task": "token_classify"})
        assert tokens.status == 200, tokens.content
        return [
            await scores(client, text_1=QUERY, text_2=DOCUMENTS),
            *(entry["data"] for entry in tokens.json()["data"]),
        ]

    for one, two in zip(*await on_both(kit.encoder("bert", 1), ask), strict=True):
        np.testing.assert_allclose(two, one, rtol=0, atol=1e-4)


async def test_vectors_of_a_decoder_with_layers_in_folders_are_those_of_transformers():
    folder = kit.embedder("qwen3", "mean_tokens", dense=24)
    one, two = await on_both(folder, lambda client: vectors(client, FEW))
    kit.close(two, kit.oracle(folder).encode(FEW), 1e-4)
    np.testing.assert_allclose(two, one, rtol=0, atol=1e-4)
