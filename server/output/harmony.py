"""Harmony: gpt-oss's output, in which every message names its channel and may name a recipient.

Owner: loop, a generator per choice. In: a Source from the first generated token on, after `<|start|>assistant`. Out:
the analysis channel as reasoning, the final channel and commentary without a recipient as content, messages to a
function as calls. One machine reads all channels, because they alternate: an answer may have several messages in each.
A header without a message is content, unless all its words belong to the format.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.NAME<|message|>{...}
"""

from __future__ import annotations

from dataclasses import dataclass

from server.output.events import Sink
from server.output.reasoning import begin_answer
from server.output.source import Reader, Source, accept, ignore, space, until
from server.output.tools.json_text import copy_json

RECIPIENT = "to="
WORDS = ("assistant", "analysis", "commentary", "final", "json")  # words of headers other than names of functions


@dataclass(frozen=True, slots=True)
class Harmony:
    """Markers; each is one token of the vocabulary."""

    start: str = "<|start|>"
    channel: str = "<|channel|>"
    message: str = "<|message|>"
    constrain: str = "<|constrain|>"
    end: str = "<|end|>"
    call: str = "<|call|>"
    stop: str = "<|return|>"

    @property
    def marks(self) -> tuple[str, ...]:
        """The markers that end a text."""
        return (self.end, self.call, self.stop, self.start, self.channel, self.message)


def harmony(source: Source, sink: Sink, form: Harmony, *, reasons: bool, calls: bool) -> Reader[None]:
    """Read all messages of an answer. Without `reasons`, analysis is content; without `calls`, so are messages to
    functions.
    """
    source.answering = not reasons
    source.keep()
    yield from space(source)
    marker = yield from accept(source, RECIPIENT, form.channel, form.start, form.message)
    if not marker and source.cut:  # in the middle of the first header
        return
    if not marker:  # text before the first channel
        source.unread()
        yield from begin_answer(source)
        marker = yield from until(source, form.marks, sink.content)
    while marker:
        if marker in (form.end, form.call, form.stop):
            yield from begin_answer(source)
            marker = yield from until(source, form.marks, sink.content)
            continue
        source.answering = not reasons
        source.keep(len(marker))
        header = [marker if marker == RECIPIENT else ""]
        while marker in (RECIPIENT, form.start, form.channel, form.constrain):
            header.append(" " if marker != RECIPIENT else "")
            marker = yield from until(source, (*form.marks, form.constrain), header.append)
        words, read = "".join(header).split(), source.take_buffered()
        if marker == form.message:
            sink.drop_space()
            if calls and sink.is_full and any(word.startswith(RECIPIENT) for word in words):
                sink.content(read)
                words = []
            marker = yield from _body(source, sink, form, words, reasons, calls)
        elif not (source.cut and not marker) and _says_something(words, cut=not marker):
            sink.content(read.removesuffix(marker))


def _says_something(words: list[str], cut: bool) -> bool:
    """Whether a header without a message has words other than the format's; a `cut` header may end inside a word."""
    last = words.pop() if cut and words else WORDS[0]
    return not {*words} <= {*WORDS} or not any(word.startswith(last) for word in WORDS)


def _body(source: Source, sink: Sink, form: Harmony, words: list[str], reasons: bool, calls: bool) -> Reader[str]:
    """Read one message; returns the marker after it."""
    recipient = next((word.removeprefix(RECIPIENT) for word in words if word.startswith(RECIPIENT)), "")
    if reasons and "analysis" in words and not (recipient and calls):
        sink.thinking = True
        marker = yield from until(source, form.marks, sink.reasoning)
        sink.thinking = False
        return marker
    yield from begin_answer(source)
    if recipient and calls:
        return (yield from _call(source, sink, form, recipient))
    return (yield from until(source, form.marks, sink.content))


def _call(source: Source, sink: Sink, form: Harmony, recipient: str) -> Reader[str]:
    """Read the arguments of a call; OpenAI's own tools take text instead of JSON."""
    sink.call(recipient.removeprefix("functions."))
    if (yield from space(source)) == "{":
        ended = yield from copy_json(source, sink.arguments, "".join({mark[0] for mark in form.marks}))
        marker = (yield from until(source, form.marks, ignore)) if ended else ""
    else:
        marker = yield from until(source, form.marks, sink.arguments)
        ended = bool(marker)
    if ended:
        sink.end_call()
    return marker
