"""Stop strings belong to the answer: they are matched behind the reasoning, over a socket and however tokens fall."""

from __future__ import annotations

import json
import random

import httpx
import pytest

from engine.base.request import Delta, FinishReason
from server.output.choices import ChoiceStream
from server.output.events import Said
from server.output.harmony import Harmony
from server.output.markers import Markers
from server.output.parser import Parsers, Parsing
from server.output.reasoning import REASONING
from server.output.text import StopStrings
from server.output.tools.formats import TOOLS
from server.render.prompt import Prompt, id_array
from tests.server.live import listening
from tests.server.output import transcripts as golden
from tests.server.scripted import play, tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="session")

CALL = '<tool_call>{"name": "f", "arguments": {"s": "END"}}</tool_call>'
HI = [{"role": "user", "content": "Hi"}]


async def answers(client, path: str, text: str, said, **body) -> tuple:
    """(reasoning, content, why it ended, the stop string) of the scripted text, equal whole and streamed."""
    play(client, text, text)
    async with listening(client) as url, httpx.AsyncClient(base_url=url, timeout=30) as http:
        whole = (await http.post(path, json={"messages": HI, "max_tokens": 200, **body})).json()
        streamed = await http.post(path, json={"messages": HI, "max_tokens": 200, "stream": True, **body})
    events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    found, again = said(whole), said(*events)
    assert found == again
    return found


def of_chat(*bodies) -> tuple:
    choices = [body["choices"][0] for body in bodies if body["choices"]]
    parts = [choice.get("message") or choice["delta"] for choice in choices]
    texts = ("".join(part.get(key) or "" for part in parts) for key in ("reasoning", "content"))
    return (*texts, choices[-1]["finish_reason"], choices[-1]["stop_reason"])


def of_messages(*bodies) -> tuple:
    if len(bodies) == 1:
        blocks = bodies[0]["content"]
        texts = ("".join(block.get(key, "") for block in blocks) for key in ("thinking", "text"))
        return (*texts, bodies[0]["stop_reason"], bodies[0]["stop_sequence"])
    deltas = [body["delta"] for body in bodies if body["type"] == "content_block_delta"]
    texts = ("".join(delta.get(key, "") for delta in deltas) for key in ("thinking", "text"))
    end = next(body["delta"] for body in bodies if body["type"] == "message_delta")
    return (*texts, end["stop_reason"], end["stop_sequence"])


@pytest.mark.parametrize(
    ("text", "stop", "meant"),
    [
        ("<think>a END b</think>\n\nyes", "END", ("a END b", "yes", "stop", None)),
        ("<think>a END b</think>\n\nyes END no", "END", ("a END b", "yes ", "stop", "END")),
        ("<think>a</think>\n\nEND no", "END", ("a", "", "stop", "END")),
        ("<think>a\n\nb</think>\n\nyes\n\nno", "\n\n", ("a\n\nb", "yes", "stop", "\n\n")),
        ("plain END no", "END", ("", "plain ", "stop", "END")),
        ("<think>END only", "END", ("END only", "", "stop", None)),
    ],
)
async def test_a_stop_string_in_the_reasoning_ends_nothing(client, text, stop, meant):
    assert await answers(client, "/v1/chat/completions", text, of_chat, stop=[stop]) == meant
    ends = {"stop": "end_turn"} if meant[3] is None else {"stop": "stop_sequence"}
    found = await answers(client, "/v1/messages", text, of_messages, stop_sequences=[stop], thinking=THINKING)
    assert found == (*meant[:2], ends["stop"], meant[3])


THINKING = {"type": "enabled", "budget_tokens": 1024}


async def test_without_a_reasoning_parser_all_text_counts(client):
    text = "<think>a END b</think>yes"
    play(client, text, reasoning="none")
    async with listening(client) as url, httpx.AsyncClient(base_url=url) as http:
        body = {"messages": HI, "max_tokens": 99, "stop": "END"}
        choice = (await http.post("/v1/chat/completions", json=body)).json()["choices"][0]
    assert (choice["message"]["content"], choice["stop_reason"]) == ("<think>a ", "END")


async def test_other_ends_hold_in_the_reasoning_too(client):
    play(client, "<think>one two three four five six seven")
    async with listening(client) as url, httpx.AsyncClient(base_url=url) as http:
        body = {"messages": HI, "max_tokens": 3, "stop": "four"}
        reply = (await http.post("/v1/chat/completions", json=body)).json()
    assert (reply["choices"][0]["finish_reason"], reply["usage"]["completion_tokens"]) == ("length", 3)


def read(text: str, stop: str, pieces: list[list[int]], prompt: str, **forms) -> tuple:
    """(reasoning, content, calls, the stop string) of a text whose tokens arrive in these pieces."""
    parsers = Parsers(Markers(tokenizer().table), **forms)
    parser = Parsing(parsers, golden.TOOLS).parser(Prompt(id_array([1]), text=prompt))
    stream = ChoiceStream(tokenizer(), stop=StopStrings([stop] if stop else []), parser=parser)
    events, reason = [], None
    for at, ids in enumerate(pieces):
        last = at == len(pieces) - 1
        piece = stream.take(Delta(0, ids, FinishReason.LENGTH if last else FinishReason.NONE))
        events += piece.events or []
        reason = reason or piece.stop_reason
    said = Said(events)
    return said.reasoning, said.content, [(call.name, call.arguments) for call in said.calls], reason


def forms() -> list[tuple[dict, str, str]]:
    """(the parsers, their name, a transcript)."""
    found = []
    for name in ("qwen3", "granite", "hy_v3", "deepseek_r1", "hunyuan_a13b"):
        form = {"reasoning": REASONING[name], "written": REASONING[name], "tools": TOOLS["hermes"]}
        found += [(form, name, case[2]) for case in golden.REASONING_CASES if case[:2] == (name, "may open")]
    form = {"harmony": Harmony(), "reads_reasoning": True, "reads_calls": True}
    return found + [(form, "harmony", case[0]) for case in golden.HARMONY_CASES]


async def test_the_answer_is_cut_where_the_stop_string_begins_in_the_unstopped_content():
    """Every substring of content that occurs in it, at every way to cut the tokens; letters are tokens of their own."""
    draw, told = random.Random(49), 0
    for form, name, text in forms():
        letters = [token for char in text for token in tokenizer().encode(char)]
        prompt = "...assistant\n"
        free = read(text, "", [letters], prompt, **form)
        if free[2] or not (free[0] or free[1]):
            continue  # calls are matched as the model wrote them
        for _ in range(12):
            source = free[1] if free[1] and draw.random() < 0.7 else free[0] or free[1]
            at = draw.randrange(len(source))
            stop = source[at : at + draw.choice((1, 2, 4))]
            cuts = sorted(draw.randrange(len(letters) + 1) for _ in range(draw.randrange(6)))
            pieces = [letters[a:b] for a, b in zip([0, *cuts], [*cuts, len(letters)])]
            found = read(text, stop, pieces, prompt, **form)
            assert found == read(text, stop, [letters], prompt, **form), (name, text, stop, pieces)
            assert found[0] == free[0] or (found[3] and free[0].startswith(found[0])), (name, text, stop)
            if stop in free[1] and stop in text and "<|" not in free[1]:  # no border of two messages, no header
                assert (found[1], found[3]) == (free[1][: free[1].index(stop)], stop), (name, text, stop)
                told += 1
    assert told > 40
