"""The grammar of calls in harmony, the format of gpt-oss, in which every message names its channel.

output/harmony.py reads it. Owner: none, a pure function; called in the pool. In: the tools that may be called, and the
schema of an answer without a call. Out: a GrammarSpec of everything after `<|start|>assistant`. A call ends the model's
turn, so there is only one.

    must call    thought* (call | final)      may call    (message <|end|><|start|>assistant)* (call | message)
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.base.grammar import GrammarSpec
from server.structure.call_values import Tool, literal

THOUGHTS = """\
start: thought* @answer
thought: <|channel|> "analysis" <|message|> TEXT <|end|> <|start|> "assistant"
TEXT: /(?s:.*)/
"""
SAID = """\
said: <|channel|> ("analysis" | "commentary" | "final") (" "? <|constrain|> "json")? <|message|> TEXT
TEXT: /(?s:.*)/
"""
MESSAGES = 'start: (said <|end|> <|start|> "assistant")* @answer\n' + SAID


def harmony_calls(tools: Sequence[Tool], *, must: bool, answer: str = "") -> GrammarSpec:
    """`answer`: the schema, as `%json` takes it, of a final message that may replace a call."""
    rules, calls = [], []
    for at, tool in enumerate(tools):
        head = literal(f"commentary to=functions.{tool.name} ")
        calls.append(f'{head} <|constrain|> "json" <|message|> args_{at}')
        rules.append(f"args_{at}: %json {tool.text(tool.parameters, tool.path)}")
    ways = ["call"]
    if answer:
        ways.append('<|channel|> "final" (" "? <|constrain|> "json")? <|message|> answer')
        rules.append(f"answer: %json {answer}")
    free = not must and not answer
    if free:
        ways.append("said")
        rules.append(SAID)
    text = [f"start: {' | '.join(ways)}", f"call: <|channel|> ({' | '.join(f'({call})' for call in calls)})", *rules]
    return GrammarSpec("lark", "\n".join(text), around=MESSAGES if free else THOUGHTS)
