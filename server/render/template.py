"""ChatTemplate: a checkpoint's chat template, compiled once in a sandbox and rendered under a clock and a byte cap.

Owner: any thread; nothing in it changes after it is made. In: messages as plain data. Out: the prompt's text. The
dialect is the one checkpoints are written for: trimmed blocks, loop controls, `tojson` without HTML escapes,
`raise_exception`, `strftime_now`, the `generation` block. What a template expects is read from its syntax tree.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from server.render.errors import RenderError, shown
from server.render.template_facts import TemplateFacts, read_facts

ContentFormat = Literal["string", "openai"]

OUR_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
TICK = "omniloop_tick"
MAX_REPEAT = 1 << 20  # characters that `text * n` may make


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
            tree = _ENVIRONMENT.parse(source)
            self.facts: TemplateFacts = read_facts(tree)
            _add_ticks(tree)
            code = _ENVIRONMENT.compile(tree)
            self._template = jinja2.Template.from_code(_ENVIRONMENT, code, _ENVIRONMENT.make_globals(None))
        except (jinja2.TemplateError, RecursionError) as error:
            raise _failed(f"The chat template does not compile: {shown(str(error), 200)}") from error
        self.content_format: ContentFormat = (
            content_format if content_format in ("string", "openai") else self.facts.content_format  # type: ignore
        )

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
            **self._checked_kwargs(kwargs or {}, limits),
            **self._special_tokens,
            "messages": messages,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
            TICK: clock.tick,
        }
        try:
            return self._collect(values, clock, limits.max_output_bytes)
        except RenderError:
            raise
        except jinja2.exceptions.SecurityError as error:  # its text may hold the address of an object
            raise _failed("The chat template does what its sandbox forbids.") from error
        except jinja2.TemplateError as error:
            raise _failed(f"The chat template refused the conversation: {shown(str(error), 200)}") from error
        except RecursionError as error:
            raise _failed("The chat template nests too deeply.") from error
        except Exception as error:  # a template can raise whatever its expressions raise; its text may hold anything
            raise _failed(f"The chat template failed on this conversation ({type(error).__name__}).") from error

    def _collect(self, values: dict[str, Any], clock: _Clock, max_bytes: int) -> str:
        pieces: list[str] = []
        size = 0
        for piece in self._template.generate(values):
            size += len(piece)
            if size > max_bytes:
                raise _failed(f"The chat template's output passes {max_bytes} bytes; shorten the conversation.")
            clock.tick()
            pieces.append(piece)
        return "".join(pieces)

    def _checked_kwargs(self, kwargs: Mapping[str, Any], limits: TemplateLimits) -> dict[str, Any]:
        if not kwargs:
            return {}
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
                raise _failed(f"The chat template ran for more than {self._timeout:g} seconds.")
        return ""


def _json_size(value: Mapping[str, Any]) -> int:
    try:
        return len(json.dumps(value, default=str))
    except (RecursionError, ValueError) as error:
        raise _failed("chat_template_kwargs nests too deeply.") from error


def _failed(message: str) -> RenderError:
    return RenderError(400, "template_error", message, "messages")


def _add_ticks(tree: nodes.Template) -> None:
    # A loop without output would never reach the clock, so every loop body begins with a call of it.
    for loop in tree.find_all(nodes.For):
        call = nodes.Call(nodes.Name(TICK, "load"), [], [], None, None)
        loop.body.insert(0, nodes.ExprStmt(call, lineno=loop.lineno).set_environment(_ENVIRONMENT))
        call.set_lineno(loop.lineno, override=True)
        call.set_environment(_ENVIRONMENT)


class _Generation(Extension):
    """`{% generation %}` marks the assistant's own text for training; here it is only a scope."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with a bound on repeated text."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (abs(left) < 1 << 32 and abs(right) <= 64):
            raise _failed("The chat template asks for a power that is too large.")
        for many, times in ((left, right), (right, left)):
            if isinstance(many, str | list | tuple) and isinstance(times, int) and len(many) * times > MAX_REPEAT:
                raise _failed(f"The chat template asks for a repetition of more than {MAX_REPEAT} items.")
        return super().call_binop(context, operator, left, right)


class _Dict:
    """`dict(...)` without the type behind it, whose methods lead out of plain data."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """`namespace(...)`, in which no name begins with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that a template may have a name `self` in it
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError("a namespace takes no name that begins with an underscore")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern[:256])


def _make_environment() -> _Environment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    extra: dict[str, Callable[..., Any]] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals.update(extra, dict=_Dict(), namespace=_Namespace)
    environment.globals.pop("lipsum", None)
    return environment


_ENVIRONMENT = _make_environment()
