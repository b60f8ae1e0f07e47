"""The schema applies only after the reasoning of a model that reasons first."""

import json
from dataclasses import replace

import pytest

from engine.base.grammar import Grammar, GrammarSpec
from engine.grammar.compile import compile_now
from engine.grammar.vocabulary import GrammarVocabulary
from server.output.parser_choice import choose_parsers
from server.output.reasoning import REASONING
from server.structure.thinking import behind_thinking, in_harmony, with_budget
from tests.engine.grammar.kit import allowed

pytestmark = pytest.mark.asyncio(loop_scope="session")
IDS = {"<think>": 7, "</think>": 8}
YES = GrammarSpec("lark", 'start: "yes"')
HARMONY = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>")


@pytest.mark.parametrize(
    ("name", "state", "starts", "opens"),
    [
        ("qwen3", "open", (8,), ()),
        ("qwen3", "may open", (8,), (7,)),
        ("qwen3", "closed", (), ()),
        ("deepseek_r1", "may open", (8,), ()),  # the model reasons even if no token opens the block
        ("mistral", "open", (8,), ()),
        ("minimax_m2_append_think", "open", (), ()),  # the reasoning is part of the content
    ],
)
async def test_markers_that_are_tokens_put_the_grammar_to_sleep(name, state, starts, opens):
    found = behind_thinking(YES, REASONING[name], state, IDS)
    assert (found.starts, found.opens, found.around) == (starts, opens, "")


@pytest.mark.parametrize(("name", "starts"), [("qwen3", (8, 9)), ("glm45", (8, 9)), ("deepseek_r1", (8,))])
async def test_a_call_that_ends_reasoning_wakes_the_grammar_of_calls(name, starts):
    ids = {**IDS, "<tool_call>": 9}
    calls = GrammarSpec("lark", 'start: NL section\nsection: <[9]> "x"')
    asleep = replace(calls, starts=(9,), fed=(9,))  # without reasoning, inactive until a call
    for spec in (calls, asleep):
        found = behind_thinking(spec, REASONING[name], "open", ids)
        assert (found.starts, found.fed) == (starts, starts[1:])
        assert behind_thinking(spec, REASONING[name], "closed", ids) is spec
    assert behind_thinking(YES, REASONING[name], "open", ids).starts == (8,)
    around = behind_thinking(asleep, REASONING["granite"], "open", ids)
    assert (around.starts, around.fed, bool(around.around)) == ((), (), True)
    budget = with_budget(Grammar(asleep, None), 3)
    assert budget is not None
    assert budget.spec.budget is None, "nothing is forced where nothing is thought"


async def test_a_grammar_that_says_where_it_begins_stays_as_it_is():
    spec = GrammarSpec("lark", 'start: "yes"', starts=(3,))
    assert behind_thinking(spec, REASONING["qwen3"], "open", IDS) is spec
    assert in_harmony(spec) is spec


def takes(spec, text, special=()):
    """Whether the grammar accepts a whole text; each of the `special` spellings is a token."""
    tokens = (*(bytes([byte]) for byte in range(256)), *(name.encode() for name in special))
    vocabulary = GrammarVocabulary(tokens.__getitem__, lambda number: number > 255, len(tokens))
    matcher = compile_now(spec, vocabulary).matcher()
    ids, rest = [], text.encode()
    while rest:
        number = next((256 + at for at, name in enumerate(special) if rest.startswith(name.encode())), rest[0])
        ids.append(number)
        rest = rest[len(tokens[number]) :]
    return matcher.try_consume_tokens(ids) == len(ids) and vocabulary.end in allowed(matcher)


BEGIN, END = "Here is my thought process:", "Here is my response:"


@pytest.mark.parametrize(
    ("state", "text", "wanted"),
    [
        ("may open", "yes", True),
        ("may open", "no", False),
        ("may open", f'{BEGIN} hm, "no"\n{END}yes', True),
        ("may open", f"{BEGIN} hm, yes", False),
        ("open", f"hm{END}yes", True),
        ("open", "yes", False),
    ],
)
async def test_markers_in_letters_become_a_grammar_around_the_answers(state, text, wanted):
    spec = behind_thinking(YES, REASONING["granite"], state, {})
    assert takes(spec, text) == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("<|channel|>final<|message|>yes", True),
        ("<|channel|>final <|constrain|>json<|message|>yes", True),
        ("<|channel|>analysis<|message|>no, wait<|end|><|start|>assistant<|channel|>final<|message|>yes", True),
        ("<|channel|>analysis<|message|>yes", False),
        ("yes", False),
    ],
)
async def test_the_final_message_of_harmony_is_held(text, wanted):
    assert takes(in_harmony(YES), text, HARMONY) == wanted


CHANNEL = {"<|channel>": 7, "<channel|>": 8}
K3 = ("<|open|>", "<|close|>", "<|sep|>")


async def test_a_marker_of_a_token_and_letters_opens_reasoning_by_its_token():
    found = behind_thinking(YES, REASONING["gemma4"], "may open", CHANNEL)
    assert (found.starts, found.opens, found.around) == ((8,), (7,), "")


@pytest.mark.parametrize(
    ("state", "text", "wanted"),
    [
        ("open", "hm <close|close<|close|>think<|sep|>yes", True),
        ("open", "hm<|close|>think<|sep|>no", False),
        ("open", "yes", False),
        ("may open", "yes", True),
        ("may open", "<|open|>think<|sep|>hm<|close|>think<|sep|>yes", True),
        ("may open", "<|open|>think<|sep|>yes", False),
    ],
)
async def test_markers_of_several_tokens_become_a_grammar_around_the_answers(state, text, wanted):
    ids = {name: 256 + at for at, name in enumerate(K3)}
    assert takes(behind_thinking(YES, REASONING["kimi_k3"], state, ids), text, K3) == wanted


async def test_content_is_held_and_reasoning_is_free(client, monkeypatch):
    parsers = choose_parsers(client.state.tokenizer, [], "", tools="none", reasoning="granite")
    monkeypatch.setattr(client.state, "parsers", parsers)
    format = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [1, 22, 333]}}}
    draws = {"temperature": 1, "n": 4, "max_tokens": 60, "ignore_eos": False}
    digits = {str(client.state.tokenizer.encode(digit)[0]): 100 for digit in "123"}
    reply = (await client.chat(response_format=format, logit_bias=digits, **draws)).json()
    assert {json.loads(choice["message"]["content"]) for choice in reply["choices"]} <= {1, 22, 333}
    begins = {str(client.state.tokenizer.encode("H")[0]): 100}
    (choice,) = (await client.chat(response_format=format, logit_bias=begins, **{**draws, "n": 1})).json()["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", None)
    assert choice["message"]["reasoning"]
