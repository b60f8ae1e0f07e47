"""OutputParser: one choice's text into events. Parsing: what to parse in a request's answers.

Owner: loop; an OutputParser belongs to one choice, Parsers to the server. In: text as it is detokenized, token by
token. Out: events (output/events.py), and the number of reasoning tokens. Reasoning comes first, then content and
calls; both readers share one Source, so no text is read twice.

    text -> Source -> think() -> calls machine -> Sink -> events -> dialect
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from server.output.events import Event, NewId, Sink, TooManyCalls
from server.output.harmony import Harmony, harmony
from server.output.markers import Markers
from server.output.reasoning import ReasoningFormat, State, begin_answer, continued_state, state_of, think
from server.output.source import Reader, Source, until
from server.output.tools.base import Schemas, ToolFormat
from server.output.tools.formats import ANY_MODEL
from server.render.prompt import Prompt

LETTERS = string.ascii_letters + string.digits


class OutputParser:
    """Reads the text of one choice. The parser does not know its choice, so Python frees the parser with the choice."""

    __slots__ = ("_ended", "_marks", "_must_call", "_run", "_sink", "_source", "_waiting", "reasoning_tokens")

    def __init__(
        self,
        source: Source,
        sink: Sink,
        run: Generator[None, None, None],
        marks: Sequence[str] = (),
        must_call: bool = False,
    ) -> None:
        """`marks`: markers of calls. `must_call`: the grammar allows only calls."""
        self._source = source
        self._sink = sink
        self._run = run
        self._marks = marks
        self._must_call = must_call
        self._ended = False
        self._waiting = 0  # reasoning tokens that may still turn out to be the end marker
        self.reasoning_tokens = 0
        self._advance()

    def feed(self, text: str) -> None:
        """Parse the text of one token; "" if it has none yet."""
        was_thinking = self._sink.thinking
        if text and not self._ended:
            self._source.feed(text)
            self._advance()
        if not was_thinking:
            return
        if not self._sink.thinking:
            self._waiting = 0
            return
        self._waiting += 1
        if not self._source.pending:
            self.reasoning_tokens += self._waiting
            self._waiting = 0

    @property
    def answering(self) -> bool:
        """Whether the newest text is of the answer, not of reasoning or of a message's header."""
        return self._source.answering

    def gate(self) -> None:
        """From here on, `given_back` returns text of the answer that arrived together with the end of the reasoning."""
        self._source.gated = True

    @property
    def end_mark(self) -> str:
        """The marker that ended the reasoning; "" if there was none."""
        return self._source.end_mark

    def given_back(self) -> str:
        """The text that was fed and is not parsed: the caller matches stop strings in it and feeds the result."""
        source = self._source
        text, source.given_back = source.given_back, ""
        return text

    @property
    def in_call(self) -> bool:
        """Whether the text is inside a call."""
        return self._sink.in_call

    def finish(self, cut: bool = False) -> None:
        """End the answer; `cut`: by a length limit. If only calls are allowed, unfinished text is dropped, not
        content.
        """
        if not self._ended:
            self._drop_cut_mark()
            self._sink.muted = cut and self._must_call
            self._source.closed, self._source.cut = True, cut
            if self._sink.thinking:
                self.reasoning_tokens += self._waiting
            self._advance()
            self._sink.finish()

    def _drop_cut_mark(self) -> None:
        """Drop the beginning of a marker if the answer was cut off inside it after a call: it is no content and no
        argument.
        """
        source = self._source
        rest = source.text[source.at :]
        if rest and self._sink.after_call and any(mark.startswith(rest) and mark != rest for mark in self._marks):
            source.text = source.text[: source.at]

    def take(self) -> list[Event]:
        """Events since the last call."""
        return self._sink.take()

    def _advance(self) -> None:
        if self._ended:
            return
        try:
            self._ended = next(self._run, True) is True
        except TooManyCalls:  # this call and all text after it become content, as the model wrote them
            self._sink.reject(self._source.take_buffered())
            self._run = _plain(self._source, self._sink)
            self._ended = next(self._run, True) is True


@dataclass(frozen=True, slots=True)
class Parsers:
    """The server's parsers, with markers in the spelling of its vocabulary."""

    markers: Markers
    reasoning: ReasoningFormat | None = None  # with markers as single characters
    tools: ToolFormat | None = None
    written: ReasoningFormat | None = None  # the same reasoning format as written in prompts
    written_tools: ToolFormat | None = None
    harmony: Harmony | None = None  # if set, reads reasoning and calls in place of the other two
    reads_reasoning: bool = False  # whether harmony reads reasoning
    reads_calls: bool = False
    reasoning_name: str = "none"
    tools_name: str = "none"

    @property
    def is_empty(self) -> bool:
        """Whether every answer is plain text."""
        return self.reasoning is None and self.tools is None and self.harmony is None

    @property
    def reads_any_reasoning(self) -> bool:
        return self.reasoning is not None or self.reads_reasoning

    @property
    def can_end_reasoning(self) -> bool:
        """Whether a budget can force the end of reasoning: its markers must be tokens."""
        form, ids = self.written, self.markers.ids
        if form is None or form.suffix or self.harmony is not None:
            return False
        return any(text in ids for text in form.ends) and (form.always or any(text in ids for text in form.begins))

    @property
    def can_call(self) -> bool:
        return self.tools is not None or self.reads_calls

    def that_call(self) -> Parsers:
        """The parsers for required calls: a model without its own format writes a JSON array."""
        if self.can_call:
            return self
        return replace(self, tools=ANY_MODEL, written_tools=ANY_MODEL, tools_name="json")


@dataclass(frozen=True, slots=True)
class Parsing:
    """The parsing that one request needs."""

    parsers: Parsers
    tools: Sequence[Mapping[str, Any]] | None = None  # without tools, no calls are parsed
    most_calls: int = 0  # further calls are dropped; 0: no limit
    must_call: bool = False  # whether the answer may contain only calls
    call_limit: int = 0  # further calls become content; 0: no limit
    argument_limit: int = 0  # most bytes of a call's arguments; 0: no limit
    continued: str | None = None  # text of the message that the answer continues
    id_prefix: str = "chatcmpl-tool-"
    own_ids: bool = True  # whether ids have the form of the model's template
    shows_special: bool = False
    shows_reasoning: bool = True

    def parser(self, prompt: Prompt) -> OutputParser | None:
        """The parser of one choice; None if its text needs no parser."""
        parsers, text = self.parsers, prompt.text or ""
        form = parsers.written
        state, fresh = self.reasoning_state(prompt)
        calls = self.tools is not None and parsers.can_call
        if parsers.harmony is None and state == "closed" and not calls:
            return None
        markers = parsers.markers
        source = Source()
        sink = Sink(
            self._new_id(text),
            spaced=calls or bool(form and form.wrappers),
            most_calls=self.most_calls,
            call_limit=self.call_limit,
            argument_limit=self.argument_limit,
            shows_reasoning=self.shows_reasoning,
            spelling=markers.with_special if self.shows_special else markers.skipped,
        )
        if parsers.harmony is not None:
            run = harmony(source, sink, parsers.harmony, reasons=parsers.reads_reasoning, calls=calls)
        else:
            tools, reasoning = parsers.tools if calls else None, parsers.reasoning
            if reasoning is not None and not calls:  # then a call's marker does not end reasoning either
                reasoning = replace(reasoning, stops=())
            run = _answer(source, sink, reasoning, state, fresh, tools, Schemas(self.tools))
        marks = parsers.tools.marks if calls and parsers.tools is not None else ()
        return OutputParser(source, sink, run, marks, calls and self.must_call)

    def reasoning_state(self, prompt: Prompt) -> tuple[State, bool]:
        """The state of reasoning at the end of the prompt, and whether the prompt ends with the opening marker."""
        form = self.parsers.written
        if form is None:
            return "closed", False
        state, fresh = state_of(form, prompt.text or "")
        if self.continued is not None:
            state, fresh = continued_state(form, self.continued, state), False
        return state, fresh

    def _new_id(self, prompt: str) -> NewId:
        """A function that makes ids of calls: random; nine characters for Mistral; tool name and running
        number for Kimi.
        """
        form = self.parsers.tools
        kind = form.ids if form is not None and self.own_ids else "hex"
        if kind == "mistral":
            return lambda name, number: "".join(secrets.choice(LETTERS) for _ in range(9))
        if kind == "kimi":
            earlier = prompt.count("<|tool_call_begin|>")
            return lambda name, number: f"functions.{name}:{earlier + number}"
        return lambda name, number: self.id_prefix + secrets.token_hex(16)


def _answer(
    source: Source,
    sink: Sink,
    reasoning: ReasoningFormat | None,
    state: State,
    fresh: bool,
    tools: ToolFormat | None,
    schemas: Schemas,
) -> Reader[None]:
    """Read reasoning, then content and calls."""
    wrappers: tuple[str, ...] = ()
    if reasoning is not None:
        yield from think(source, sink, reasoning, state, fresh)
        yield from begin_answer(source)
        wrappers = reasoning.wrappers
    if tools is not None:
        if wrappers:  # wrappers surround calls too
            tools = replace(tools, skips=tuple(dict.fromkeys((*tools.skips, *wrappers))))
        yield from tools.machine(source, sink, tools, schemas)
    while (yield from until(source, wrappers, sink.content)):
        sink.drop_space()


def _plain(source: Source, sink: Sink) -> Reader[None]:
    """Read everything as content."""
    yield from until(source, (), sink.content)
