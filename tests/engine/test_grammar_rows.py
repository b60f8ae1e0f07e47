"""Answers under a grammar, through the whole engine: what they say, and that nothing else about them changes."""

import asyncio
import json
from dataclasses import replace

import pytest

import engine.runtime
from engine import FinishReason
from engine.grammar.compile import compile_now
from engine.grammar.spec import GrammarSpec
from engine.grammar.vocabulary import GrammarVocabulary
from server.render.load_tokenizer import load_tokenizer
from tests import tiny
from tests.engine.host_accelerator import HostAccelerator
from tests.engine.stand_in_accelerator import StandInAccelerator
from tests.engine_kit import answer_deltas, prompts, running, text_request

FOLDER = tiny.checkpoint("qwen3")
TOKENIZER = load_tokenizer(FOLDER)
VOCABULARY = GrammarVocabulary(TOKENIZER.token_bytes, TOKENIZER.is_special, TOKENIZER.vocab_size)
END = tiny.IDS["<|im_end|>"]
PROMPTS = prompts(8, tiny.FIRST_SPECIAL, seed=3, longest=60)
SCHEMA = json.dumps({
    "type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"], "additionalProperties": False, "x-guidance": {"whitespace_flexible": False},
})  # fmt: skip


def grammar(text, kind="lark", **fields):
    return compile_now(GrammarSpec(kind, text, **fields), VOCABULARY)


JSON, WORD, OPEN = grammar(SCHEMA, "schema"), grammar('start: "yes" | "no"'), grammar("start: /[a-f]+/")


@pytest.fixture(params=["host", "device", "steady"])
def path(request, monkeypatch):
    if request.param != "host":
        made = {"device": HostAccelerator, "steady": StandInAccelerator}[request.param]
        monkeypatch.setattr(engine.runtime, "open_accelerator", lambda _device: made())
    return request.param


def asked(prompt, grammar=None, max_tokens=64, **rules):
    rules = {"eos_token_ids": (END,), "temperature": 1.0, "seed": 5, **rules}
    return replace(text_request(prompt, max_tokens, **rules), grammar=grammar)


async def told(engine, request):
    """By choice: tokens, finish reason, error."""
    found = []
    for deltas in await answer_deltas(engine, request):
        tokens = [token for delta in deltas for token in delta.token_ids]
        found.append((tokens, deltas[-1].finish_reason, deltas[-1].error))
    return found


def text(tokens):
    return TOKENIZER.decode([token for token in tokens if token != END])


async def test_answers_are_of_the_grammar_and_neighbours_keep_their_tokens(path):
    async with running(FOLDER) as engine:
        free = [asked(prompt, max_tokens=20, ignore_eos=True) for prompt in PROMPTS[:4]]
        wanted = [await told(engine, request) for request in free]
        held = [asked(prompt, each) for prompt in PROMPTS[4:] for each in (JSON, WORD)]
        alone = [await told(engine, request) for request in held]
        got = await asyncio.gather(*[told(engine, request) for request in (*free, *held)])
    assert got == [*wanted, *alone]
    for (tokens, finish, error), of in zip((each[0] for each in alone), [JSON, WORD] * 4):
        assert (finish, error) == (FinishReason.COMPLETE, None)
        said = text(tokens)
        if of is WORD:
            assert said in ("yes", "no")
        else:
            value = json.loads(said)
            assert 0 <= value["a"] <= 99
            assert value["b"] in ("x", "yy")
