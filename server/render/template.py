"""ChatTemplate: a checkpoint's chat template, compiled once in a sandbox and rendered under a time limit and a byte
cap.

Owner: any thread; after construction only cached facts about accepted calls are added. In: messages as plain data. Out:
the prompt's text. The dialect is that of checkpoints: trimmed blocks, loop controls, `tojson` without HTML escapes,
`raise_exception`, `strftime_now`, the `generation` block. The template's expectations are read from its syntax tree.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import jinja2

from server.render.bounds import failed, rendering
from server.render.call_ids import NAME, SHORT_ID, IdForm, id_form
from server.render.calls import THOUGHTS, as_thoughts, has_calls, has_several, one_by_one, says_both, with_texts
from server.render.errors import RenderError, quoted
from server.render.sandbox import SANDBOX, TICK, add_ticks
from server.render.template_facts import TemplateFacts, read_facts

ContentFormat = Literal["string", "openai"]

OUR_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """Bounds on one rendering."""

    timeout: float = 5.0  # seconds
    max_output_bytes: int = 1 << 27
    max_kwargs: int = 32
    max_kwargs_bytes: int = 16384


class ChatTemplate:
    """One compiled template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], content_format: str = "auto") -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        try:
            tree = SANDBOX.parse(source)
            self.facts: TemplateFacts = read_facts(tree)
            add_ticks(tree)
            code = SANDBOX.compile(tree)
            self._template = jinja2.Template.from_code(SANDBOX, code, SANDBOX.make_globals(None))
        except (jinja2.TemplateError, RecursionError) as error:
            raise failed(f"The chat template does not compile: {quoted(str(error), 200)}") from error
        self.content_format: ContentFormat = (
            content_format if content_format in ("string", "openai") else self.facts.content_format  # type: ignore
        )

    @cached_property
    def id_form(self) -> IdForm:
        """The form of call ids that the template accepts."""
        return id_form(self._called)

    @cached_property
    def _takes_text(self) -> bool:
        """Whether arguments of calls must be text: the template rejects objects, or prints them in Python's
        notation.
        """
        arguments = {NAME: True}
        text, other = self._with_calls(json.dumps(arguments), SHORT_ID), self._with_calls(arguments, SHORT_ID)
        return text is not None and (other is None or str(arguments) in other)

    @cached_property
    def _takes_one_call(self) -> bool:
        """Whether the template rejects an assistant with several calls, or prints only the first of them."""
        if self._called(SHORT_ID) is None:
            return False
        two = self._called(SHORT_ID, SHORT_ID[::-1])
        return two is None or (f"{NAME}-0" in two and f"{NAME}-1" not in two)

    @cached_property
    def _takes_one_text(self) -> bool:
        """Whether the template rejects a message with a call, reasoning and content."""
        thought = dict.fromkeys(THOUGHTS, "b")
        return self._called(SHORT_ID, **thought) is not None and self._called(SHORT_ID, **thought, content="c") is None

    def taken(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """A conversation adapted to the template."""
        if not has_calls(messages):
            return messages
        if has_several(messages) and self._takes_one_call:
            messages = one_by_one(messages)
        if says_both(messages) and self._takes_one_text:
            messages = as_thoughts(messages)
        return with_texts(messages) if self._takes_text else messages

    def _called(self, *ids: str, **said: str) -> str | None:
        return self._with_calls("{}" if self._takes_text else {}, *ids, **said)

    def _with_calls(self, arguments: Any, *ids: str, **said: str) -> str | None:
        """A rendered conversation with calls of these ids; None if the template rejects it."""
        parts = self.content_format == "openai" and not self.facts.asks_for_string
        calls = [
            {"id": one, "type": "function", "function": {"name": f"{NAME}-{at}", "arguments": arguments}}
            for at, one in enumerate(ids)
        ]
        asked = {"role": "user", "content": [{"type": "text", "text": "a"}] if parts else "a"}
        try:
            return self.render([asked, {"role": "assistant", "content": "", "tool_calls": calls, **said}])
        except RenderError:
            return None

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        kwargs: Mapping[str, Any] | None = None,
        limits: TemplateLimits | None = None,
    ) -> str:
        """The text of the whole conversation."""
        limits = limits or TemplateLimits()
        clock = _Clock(limits.timeout)
        values = {
            **(self._checked_kwargs(kwargs, limits) if kwargs else {}),
            **self._special_tokens,
            "messages": messages,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
            TICK: clock.tick,
        }
        try:
            with rendering(limits.max_output_bytes):
                return self._collect(values, clock, limits.max_output_bytes)
        except RenderError:
            raise
        except jinja2.exceptions.SecurityError as error:  # the error's text may contain an object's address
            raise failed("The chat template does what its sandbox forbids.") from error
        except jinja2.TemplateError as error:
            raise failed(f"The chat template refused the conversation: {quoted(str(error), 200)}") from error
        except RecursionError as error:
            raise failed("The chat template nests too deeply.") from error
        except Exception as error:  # a template's expressions may raise any error, and its text may contain anything
            raise failed(f"The chat template failed on this conversation ({type(error).__name__}).") from error

    def _collect(self, values: dict[str, Any], clock: _Clock, max_bytes: int) -> str:
        pieces: list[str] = []
        size = 0
        for piece in self._template.generate(values):
            size += len(piece)
            if size > max_bytes:
                raise failed(f"The chat template's output passes {max_bytes} bytes; shorten the conversation.")
            clock.tick()
            pieces.append(piece)
        return "".join(pieces)

    def _checked_kwargs(self, kwargs: Mapping[str, Any], limits: TemplateLimits) -> dict[str, Any]:
        where = "chat_template_kwargs"
        if len(kwargs) > limits.max_kwargs:
            raise RenderError(
                400, "invalid_parameter", f"{where} has {len(kwargs)} entries; at most {limits.max_kwargs}.", where
            )
        if _json_size(kwargs) > limits.max_kwargs_bytes:
            raise RenderError(
                400, "invalid_parameter", f"{where} is larger than {limits.max_kwargs_bytes} bytes of JSON.", where
            )
        for name in kwargs:
            if name == "chat_template":
                raise RenderError(403, "override_not_trusted", "A chat template may not come in kwargs.", where)
            if name in OUR_NAMES or name in self._special_tokens or name == TICK:
                raise RenderError(
                    400,
                    "invalid_parameter",
                    f"{where}.{name} would replace a name the server passes; leave it out.",
                    f"{where}.{name}",
                )
        return dict(kwargs)


class _Clock:
    """Ends a rendering that takes too long; called for each piece of output and each turn of a loop."""

    __slots__ = ("_end", "_left", "_timeout")

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._end = time.monotonic() + timeout
        self._left = 64

    def tick(self) -> str:
        self._left -= 1
        if not self._left:
            self._left = 64
            if time.monotonic() > self._end:
                raise failed(f"The chat template ran for more than {self._timeout:g} seconds.")
        return ""


def _json_size(value: Mapping[str, Any]) -> int:
    try:
        return len(json.dumps(value, default=str))
    except (RecursionError, ValueError) as error:
        raise failed("chat_template_kwargs nests too deeply.") from error
