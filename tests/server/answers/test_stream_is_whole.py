"""500 random requests on every generation route: the joined chunks of a stream equal the answer without streaming.

Seeds, stops, characters of 1 to 4 bytes, several prompts and choices, log-probabilities, token ids, echo. The model is
tiny, and its byte tokens often end in the middle of a character.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from tests.server.conftest import quiet

pytestmark = pytest.mark.asyncio(loop_scope="session")

TEXTS = ["hello", "é😀漢字", "\u2028 a", "the and the", "x" * 60, "<|im_end|>", "1+1=", "ßß\n\tя"]
SHORT, GROUPS, PER_GROUP = 3, 10, 50  # 150, and 500 in the long run


def fields_of(draw: random.Random, vocab: int) -> dict[str, Any]:
    """Sampling fields of one random request."""
    fields: dict[str, Any] = {
        "max_tokens": draw.randrange(1, 12),
        "seed": draw.randrange(1 << 40),
        "temperature": draw.choice([0, 0.8, 1.5]),
        "n": draw.choice([1, 1, 2, 3]),
    }
    maybe = {
        "stop": draw.sample(["e", "th", "a ", "é", "o", "\ufffd", "😀"], draw.randrange(1, 4)),
        "include_stop_str_in_output": True,
        "stop_token_ids": [draw.randrange(vocab) for _ in range(20)],
        "allowed_token_ids": [*range(120, 256), draw.randrange(vocab)],  # the bytes of longer characters
        "ignore_eos": True,
        "skip_special_tokens": False,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "stream_interval": draw.randrange(1, 5),
        "top_p": 0.9,
        "frequency_penalty": 1.0,
        "repetition_detection": {"max_pattern_size": 3, "min_count": 2},
        "logit_bias": {str(draw.randrange(vocab)): 5},
    }
    fields |= {name: value for name, value in maybe.items() if draw.random() < 0.3}
    if draw.random() < 0.2:
        fields["min_tokens"] = draw.randrange(fields["max_tokens"])
    return fields


def chat_request(draw: random.Random, fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    if draw.random() < 0.4:
        fields |= {"logprobs": True, "top_logprobs": draw.randrange(4)}
    last = {"role": draw.choice(["user", "assistant"]), "content": draw.choice(TEXTS)}
    fields["echo"] = draw.random() < 0.3
    return "/v1/chat/completions", {**fields, "messages": [{"role": "user", "content": draw.choice(TEXTS)}, last]}


def completion_request(draw: random.Random, fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    if draw.random() < 0.4:
        fields["logprobs"] = draw.randrange(4)
    prompts = draw.sample(TEXTS, draw.randrange(1, 4))
    fields["echo"] = draw.random() < 0.4
    if fields["echo"] and draw.random() < 0.3:
        fields["max_tokens"] = 0
        fields.pop("min_tokens", None)
    return "/v1/completions", {**fields, "prompt": prompts if draw.random() < 0.7 else prompts[0]}


def token_request(draw: random.Random, fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    if draw.random() < 0.4:
        fields["logprobs"] = draw.randrange(4)
    ids = [draw.randrange(256) for _ in range(draw.randrange(1, 20))]
    return "/inference/v1/generate", {"token_ids": ids, "sampling_params": fields, "output_mode": "text"}


def text_of(choice: dict[str, Any]) -> str:
    for form in ("message", "delta"):
        if form in choice:
            return choice[form].get("content") or ""
    return choice["text"]


def joined(logprobs: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Log-probabilities of all chunks, in the form of the whole answer."""
    if not logprobs:
        return None
    return {name: [entry for piece in logprobs for entry in piece[name]] for name in logprobs[0]}


def check(whole: dict[str, Any], events: list[Any], sent: dict[str, Any]) -> None:
    assert events[-1] == "[DONE]", sent
    pieces: dict[int, list[dict[str, Any]]] = {}
    for event in events[:-1]:
        for choice in event["choices"]:
            pieces.setdefault(choice["index"], []).append(choice)
    assert len(pieces) == len(whole["choices"]), sent
    for choice in whole["choices"]:
        mine = pieces[choice["index"]]
        assert "".join(map(text_of, mine)) == text_of(choice), sent
        assert [piece["finish_reason"] for piece in mine[:-1]] == [None] * (len(mine) - 1), sent
        assert mine[-1]["finish_reason"] == choice["finish_reason"], sent
        assert mine[-1]["stop_reason"] == choice["stop_reason"], sent
        assert [token for piece in mine for token in piece.get("token_ids") or ()] == (choice.get("token_ids") or [])
        streamed = joined([piece["logprobs"] for piece in mine if piece["logprobs"]])
        wanted = choice["logprobs"]
        assert streamed == wanted or (streamed is None and not any(wanted.values())), sent


@pytest.mark.parametrize(
    "group", [pytest.param(group, marks=() if group < SHORT else pytest.mark.full) for group in range(GROUPS)]
)
async def test_the_pieces_make_the_whole(tiny_client, tiny_state, group):
    draw = random.Random(group)
    for _ in range(PER_GROUP):
        make = draw.choice([chat_request, completion_request, token_request])
        path, body = make(draw, fields_of(draw, tiny_state.vocabulary.width))
        whole, streamed = await asyncio.gather(
            tiny_client.post(path, body), tiny_client.post(path, {**body, "stream": True})
        )
        assert whole.status == streamed.status == 200, (body, whole.content, streamed.content)
        check(whole.json(), streamed.events(), body)
    held = await quiet(tiny_state)
    assert held["routes"] == held["used"] == tiny_client.state.places.taken == 0
