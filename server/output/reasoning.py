"""Reasoning: the part of an answer in which a model reasons, and the table of all formats (PARSERS.md section 1).

Owner: none, frozen values and a generator over a Source. In: the answer from its first token on, and whether the prompt
has opened the block. Out: reasoning to the Sink, up to the end marker; the text after the marker is left to the tool
parser. As many newlines next to markers are dropped as the format specifies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from server.output.events import Sink
from server.output.source import Reader, Source, accept, newlines, space, until

State = Literal["open", "may open", "closed"]  # state of the block at the prompt's end; may open: no marker


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Markers around reasoning."""

    begins: tuple[str, ...] = ("<think>",)
    ends: tuple[str, ...] = ("</think>",)
    stops: tuple[str, ...] = ()  # markers of calls that also end reasoning; the tool parser reads them
    always: bool = False  # the model reasons even if no marker opens the block
    lines: tuple[int, int, int] = (1, 1, 2)  # newlines dropped after `begins`, before `ends`, after `ends`
    trims: bool = False  # whether blanks next to markers are dropped, since the markers are text like any other
    wrappers: tuple[str, ...] = ()  # markers around the answer after the reasoning
    suffix: bool = False  # whether a marker may have a suffix before its `>`
    prefix: str = ""  # text added before the content if the reasoning stays part of it


NO_LINES = (0, 0, 0)
LONGEST_SUFFIX = 32  # in characters
THINK = ReasoningFormat()
ALWAYS = ReasoningFormat(always=True)
BARE = ReasoningFormat(lines=NO_LINES)

REASONING: dict[str, ReasoningFormat] = {
    "deepseek_r1": ALWAYS,
    "step5": ALWAYS,
    "deepseek_v3": BARE,
    "holo2": BARE,
    "deepseek_v4": BARE,
    "qwen3": ReasoningFormat(stops=("<tool_call>",)),
    "glm45": ReasoningFormat(stops=("<tool_call>",)),
    "glm47": ReasoningFormat(stops=("<tool_call>",)),
    "ling3": ReasoningFormat(stops=("<tool_call>",)),
    "minimax_m2": ALWAYS,
    "minimax_m2_append_think": ReasoningFormat(begins=(), ends=(), prefix="<think>"),
    "minimax_m3": ReasoningFormat(("<mm:think>",), ("</mm:think>",)),
    "kimi_k2": ReasoningFormat(stops=("<|tool_calls_section_begin|>",), lines=NO_LINES),
    "kimi": ReasoningFormat(("◁think▷",), ("◁/think▷",)),
    "kimi_k3": ReasoningFormat(
        ("<|open|>think<|sep|>",), ("<|close|>think<|sep|>",), lines=NO_LINES,
        wrappers=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
    ),
    "mistral": ReasoningFormat(("[THINK]", "<think>"), ("[/THINK]", "</think>")),
    "gemma4": ReasoningFormat(("<|channel>thought\n", "<|channel>thought"), ("<channel|>",)),
    "seed_oss": ReasoningFormat(("<seed:think>",), ("</seed:think>",)),
    "nemotron_v3": THINK,
    "granite_thinking": THINK,
    "granite": ReasoningFormat(
        ("Here is my thought process:", "Here's my thought process:"), ("Here is my response:", "Here's my response:"),
        trims=True,
    ),
    "hunyuan_a13b": ReasoningFormat(wrappers=("<answer>\n", "\n</answer>", "<answer>", "</answer>")),
    "hy_v3": ReasoningFormat(("<think",), ("</think",), suffix=True),
    "ernie45": ReasoningFormat(wrappers=("<response>\n", "\n</response>\n", "<response>", "\n</response>")),
    "step3": ALWAYS,
    "step3p5": ALWAYS,
    "mimo": THINK,
    "olmo3": THINK,
    "plamo3": THINK,
    "cohere_command3": ReasoningFormat(
        ("<|START_THINKING|>",), ("<|END_THINKING|>",), lines=NO_LINES,
        wrappers=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    "cohere_command4": ReasoningFormat(
        ("<|START_THINKING|>",), ("<|END_THINKING|>",), lines=NO_LINES, wrappers=("<|START_TEXT|>", "<|END_TEXT|>")
    ),
    "k2_horizon": ReasoningFormat(
        ("<ifm|think>", "<ifm|think_fast>", "<ifm|think_faster>"),
        ("</ifm|think>", "</ifm|think_fast>", "</ifm|think_faster>"),
    ),
}  # fmt: skip
HARMONY_NAMES = ("openai_gptoss", "gpt_oss")


def think(source: Source, sink: Sink, form: ReasoningFormat, state: State, fresh: bool) -> Reader[None]:
    """Read the reasoning. `fresh`: the prompt ends with the opening marker, so the newlines after it are still to come.

    Reads nothing if the model does not reason.
    """
    before, behind = form.lines[1], form.lines[2]
    if state == "closed":
        return
    source.answering = False
    if state == "may open":
        source.keep()
        yield from space(source)
        found = yield from accept(source, *form.begins)
        opens = found or form.always
        if found and form.suffix:
            opens = yield from _closed(source)
        if not opens and source.cut:  # in the middle of a marker
            source.at = len(source.text)
            return
        if not opens:
            sink.content(form.prefix)
            source.unread()
            return
        space_first = source.take_buffered()
        fresh = bool(found)
        if not found:
            sink.reasoning(space_first)
    sink.thinking = True
    if fresh and form.trims:
        yield from space(source)
    elif fresh:
        yield from newlines(source, form.lines[0])
    held = [""]  # newlines, or blanks, that may precede the end marker

    def emit(text: str) -> None:
        text = held[0] + text
        kept = len(text.rstrip() if form.trims else text)
        while not form.trims and kept and len(text) - kept < before and text[kept - 1] == "\n":
            kept -= 1
        held[0] = text[kept:]
        sink.reasoning(text[:kept])

    marker = yield from until(source, form.ends + form.stops, emit)
    while marker and form.suffix and not (yield from _closed(source)):
        if source.cut:
            source.at = len(source.text)
            return
        emit(marker)
        marker = yield from until(source, form.ends, emit)
    sink.thinking = False
    if not marker:
        sink.reasoning("" if form.trims else held[0])
    elif marker in form.stops:
        source.at -= len(marker)
        return
    source.end_mark = marker
    if form.trims:
        yield from space(source)
    else:
        yield from newlines(source, behind)


def begin_answer(source: Source) -> Reader[None]:
    """The text from here on is the answer, in which a client's stop strings are matched.

    If the source is gated, its caller gets the text back that has already arrived, and feeds what the stop strings
    leave of it.
    """
    source.answering = True
    if source.gated and source.pending:
        source.give_back()
        yield


def _closed(source: Source) -> Reader[bool]:
    """Read a marker's suffix and its `>`. Returns False, without reading, if the text is no suffix."""
    while True:
        suffix, end, _ = source.text[source.at : source.at + LONGEST_SUFFIX + 1].partition(">")
        if len(suffix) > LONGEST_SUFFIX or any(char == "<" or char.isspace() for char in suffix):
            return False
        if end:
            source.at += len(suffix) + 1
            return True
        if source.closed:
            return False
        yield


def state_of(form: ReasoningFormat, prompt: str) -> tuple[State, bool]:
    """(state of reasoning at the end of the prompt, whether the prompt ends with the opening marker).

    A marker counts only at the end of the prompt, before white space: there the template has written it. A marker in a
    client's text is followed by the tokens that open the model's turn.
    """
    end = prompt[-64:].rstrip()
    if end.endswith(form.begins or ("\0",)):
        return "open", prompt.endswith(form.begins)
    if end.endswith(form.ends or ("\0",)):
        return "closed", False
    return "may open", False


def continued_state(form: ReasoningFormat, text: str, state: State) -> State:
    """The state of reasoning after the text of a message that the answer continues: its last marker counts."""
    begun = max((text.rfind(marker) for marker in form.begins), default=-1)
    ended = max((text.rfind(marker) for marker in form.ends), default=-1)
    if begun < 0 and ended < 0:
        return "closed" if state == "may open" else state
    return "open" if begun > ended else "closed"
