"""The sandbox in which chat templates run: jinja2's own, with bounds on the results of expressions.

Owner: any thread; nothing in it changes after the module is imported. In: a template's syntax tree; during rendering,
each operator, call and filter whose result may be much larger than its arguments. Out: the results, or a RenderError
(render/bounds.py counts). Loops and macros call the rendering's clock at each turn.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from types import BuiltinMethodType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter

from server.render import bounds

TICK = "omniloop_tick"


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; here it is only a scope."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Code(CodeGenerator):
    """Compiles `a ~ b` to a counted call of the environment, and folds no constants except the template's own text."""

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _Formatter(SandboxedFormatter):
    """`text.format(...)`, counted field by field."""

    size = 0

    def format_field(self, value: Any, format_spec: str) -> Any:
        self._count(bounds.weight(value) + bounds.spec_numbers(format_spec))
        return super().format_field(value, format_spec)

    def convert_field(self, value: Any, conversion: Any) -> Any:
        if conversion is not None:
            self._count(bounds.weight(value))
        return super().convert_field(value, conversion)

    def _count(self, size: int) -> None:
        self.size += size
        bounds.spend(self.size)


class Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, with bounds on text."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    code_generator_class = _Code

    def concat(self, pieces: Iterable[Any]) -> str:
        """Join the text of a macro, of a `set` block or of `a ~ b`."""
        texts = [piece if isinstance(piece, str) else str(bounds.charged(piece)) for piece in pieces]
        bounds.spend(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        bounds.check_binop(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(__obj, BuiltinMethodType) and isinstance(__obj.__self__, str | bytes | int):
            args = bounds.check_method(__obj, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None:
            return None
        text = str(value.__self__)

        def bounded(*args: Any, **kwargs: Any) -> str:
            named: Mapping[str, Any] = kwargs
            if value.__name__ == "format_map":
                (named,), args = args, ()
            bounds.spend(len(text))
            return _Formatter(self).vformat(text, args, named)

        return bounded


class _Dict:
    """`dict(...)` without the type `dict` itself, whose methods would give access to more than plain data."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """`namespace(...)`, in which no name begins with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # without `self`, so that a template may use the name `self`
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
    size = bounds.as_json(value, indent=indent, separators=separators)
    if size > 4096:
        bounds.spend(size)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern[:256])


@jinja2.pass_environment
def _join(environment: jinja2.Environment, value: Iterable[Any], d: str = "", attribute: Any = None) -> str:
    """The filter `join`, which checks the size before it makes the text."""
    pieces = list(value if attribute is None else map(make_attrgetter(environment, attribute), value))
    bounds.spend(bounds.joined(str(d), pieces))
    return str(d).join(map(str, pieces))


@jinja2.pass_environment
def _sum(environment: jinja2.Environment, iterable: Iterable[Any], attribute: Any = None, start: Any = 0) -> Any:
    """The filter `sum`; adding lists copies the sum for each list."""
    items = list(iterable if attribute is None else map(make_attrgetter(environment, attribute), iterable))
    if not isinstance(start, int | float):
        bounds.spend(len(items) * sum(len(item) for item in items))
    return sum(items, start)


def _bounded(filter_: Callable[..., Any], size: Callable[..., int], skipped: int) -> Callable[..., Any]:
    """A filter whose result's size is computed by `size` first; the first `skipped` arguments are the environment's."""

    @functools.wraps(filter_)
    def counted(*args: Any, **kwargs: Any) -> Any:
        bounds.spend(size(*args[skipped:], **kwargs))
        return filter_(*args, **kwargs)

    return counted


def _reading(filter_: Callable[..., Any], skipped: int) -> Callable[..., Any]:
    """A filter that converts its value to text."""

    @functools.wraps(filter_)
    def counted(*args: Any, **kwargs: Any) -> Any:
        bounds.charged(args[skipped])
        return filter_(*args, **kwargs)

    return counted


def add_ticks(tree: nodes.Template) -> None:
    """Insert a call of the clock into each loop and macro: one without output, or a recursive macro, would
    never call it.
    """
    bodies: Sequence[nodes.For | nodes.Macro | nodes.CallBlock] = list(
        tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock))
    )
    for node in bodies:
        call = nodes.Call(nodes.Name(TICK, "load"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(call, lineno=node.lineno).set_environment(SANDBOX))
        call.set_lineno(node.lineno, override=True)
        call.set_environment(SANDBOX)


def _make() -> Sandbox:
    sandbox = Sandbox(trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[_Generation, loopcontrols])
    sandbox.finalize = bounds.charged
    filters = sandbox.filters
    for name, size in bounds.FILTERS.items():
        filters[name] = _bounded(filters[name], size, int(hasattr(filters[name], "jinja_pass_arg")))
    for name in bounds.READERS:
        filters[name] = _reading(filters[name], int(hasattr(filters[name], "jinja_pass_arg")))
    filters.update(tojson=_to_json, join=_join, sum=_sum)
    filters.pop("urlize")
    extra: dict[str, Callable[..., Any]] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    sandbox.globals.update(extra, dict=_Dict(), namespace=_Namespace)
    sandbox.globals.pop("lipsum", None)
    return sandbox


SANDBOX = _make()
