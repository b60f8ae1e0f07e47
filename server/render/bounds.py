"""Bounds on the texts that a chat template makes: a text's size is computed before the text is made.

Owner: any thread; a rendering's Budget belongs to its thread, from `rendering` to its end. In: the arguments of a
method, filter or operator whose result can be much larger than its arguments. Out: nothing, or a RenderError. Sizes are
in characters, for a list in items; a nested list has the size of its text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, ItemsView, Iterator, KeysView, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2 import Undefined
from jinja2.runtime import LoopContext, Macro

from server.render.errors import RenderError

MAX_IN_ALL = 1 << 30  # characters that one rendering may make in total
MAX_INT_BITS = 4096
MAX_PRECISION = 64
MAX_JSON_INDENT = 16
_PERCENT = re.compile(r"%(?:\([^)]*\))?[-#0 +]*(\*|\d*)(?:\.(\*|\d*))?[hlL]?[a-zA-Z]")
_NUMBERS = re.compile(r"\d+")
PRINTABLE = (int, float, type(None), range, Undefined, LoopContext, Macro)  # further types that may become text
Size = Callable[..., int]


class Budget:
    """The budget of one rendering."""

    __slots__ = ("left", "most")

    def __init__(self, most: int) -> None:
        self.most = most
        self.left = MAX_IN_ALL


_BUDGET: ContextVar[Budget] = ContextVar("budget")


@contextmanager
def rendering(most: int) -> Iterator[None]:
    """Render inside a `with` block: no text made there may be longer than `most` characters."""
    token = _BUDGET.set(Budget(most))
    try:
        yield
    finally:
        _BUDGET.reset(token)


def failed(message: str) -> RenderError:
    return RenderError(400, "template_error", message, "messages")


def spend(size: int) -> None:
    """Check and count a result of this size before it is made."""
    budget = _BUDGET.get()
    if size > budget.most:
        raise failed(f"The chat template makes a text or list of length {size}; at most {budget.most} is allowed.")
    budget.left -= size
    if budget.left < 0:
        raise failed(f"The chat template makes more than {MAX_IN_ALL} characters in all.")


def weight(value: Any) -> int:
    """Approximate length of `str(value)`; stops counting at the rendering's limit."""
    if isinstance(value, str | bytes):
        return len(value)
    most = _BUDGET.get().most
    total, waiting = 0, [value]
    while waiting and total <= most:
        item = waiting.pop()
        if isinstance(item, str | bytes):
            total += len(item) + 4
        elif isinstance(item, dict):
            waiting += [*item.keys(), *item.values()]
            total += 2
        elif isinstance(item, list | tuple | set | frozenset | KeysView | ValuesView | ItemsView):
            waiting += item
            total += 2
        elif isinstance(item, PRINTABLE):
            total += 8
        else:  # a method's text would contain an address of this process
            raise failed(f"The chat template makes text of a {type(item).__name__}; call it, or leave it out.")
        if len(waiting) > most:
            total += len(waiting)
    return total


def charged(value: Any) -> Any:
    """Count a value that is about to become text; returns the value."""
    if not isinstance(value, str | int | float | bool | None):
        size = weight(value)
        if size > 4096:
            spend(size)
    return value


# -- operators


def check_binop(operator: str, left: Any, right: Any) -> None:
    """Check `+ * ** %` on texts, lists and whole numbers."""
    if operator == "**":
        if not (abs(left) < 1 << 32 and abs(right) <= 64):
            raise failed("The chat template asks for a power that is too large.")
    elif operator == "+":
        if isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            spend(len(left) + len(right))
    elif operator == "%":
        if isinstance(left, str | bytes):
            spend(percent(left, right))
    elif isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > MAX_INT_BITS:
            raise failed("The chat template asks for a product that is too large.")
    else:
        for many, times in ((left, right), (right, left)):
            if isinstance(many, str | bytes | list | tuple) and isinstance(times, int):
                spend(len(many) * max(0, times))


def percent(text: Any, values: Any) -> int:
    """Size of `text % values`."""
    found = _PERCENT.findall(text if isinstance(text, str) else text.decode("latin1"))
    total = sum(int(number) for pair in found for number in pair if number.isdigit())
    stars = sum(number == "*" for pair in found for number in pair)
    if isinstance(values, dict):
        widest = len(found) * max(map(weight, values.values()), default=0)
    else:
        widest = weight(values)
        numbers = values if isinstance(values, tuple) else (values,)
        total += stars * max((abs(one) for one in numbers if isinstance(one, int)), default=0)
    return len(text) + total + widest


# -- methods


def padded(text: str, width: int, *_: Any) -> int:
    return max(len(text), width)


def replaced(text: Any, old: Any, new: Any, count: Any = -1) -> int:
    hits = text.count(old) if len(text) else int(not old)
    if isinstance(count, int) and count >= 0:
        hits = min(hits, count)
    return len(text) + hits * max(0, len(new) - len(old))


def expanded(text: str, tabsize: int = 8) -> int:
    return len(text) + text.count("\t") * max(0, tabsize)


def translated(text: str, table: Any) -> int:
    values = table.values() if isinstance(table, dict) else ()
    return len(text) * max((len(value) for value in values if isinstance(value, str)), default=1)


def joined(separator: Any, pieces: list[Any]) -> int:
    return sum(map(weight, pieces)) + len(separator) * max(0, len(pieces) - 1)


METHODS: dict[str, Size] = {
    "ljust": padded,
    "rjust": padded,
    "center": padded,
    "zfill": padded,
    "replace": replaced,
    "expandtabs": expanded,
    "translate": translated,
    "to_bytes": lambda value, length=1, *_, **__: int(length),
}


def check_method(method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Check a call of a method of a text or a number; returns the arguments to call it with."""
    name = method.__name__
    if name == "join" and len(args) == 1:
        args = (list(args[0]),)
        spend(joined(method.__self__, args[0]))
    elif name in METHODS:
        named = {key: value for key, value in kwargs.items() if key[0] != "_"}  # jinja2 adds variables of the loop
        spend(METHODS[name](method.__self__, *args, **named))
    return args


def spec_numbers(spec: str) -> int:
    """Sum of the widths and precisions in a `format` spec."""
    return sum(int(number) for number in _NUMBERS.findall(spec) if len(number) < 20) if len(spec) < 100 else 1 << 62


# -- filters: (value, further arguments) -> size of the result


def indented(value: Any, width: Any = 4, *_: Any, **__: Any) -> int:
    text = str(value)
    each = len(width) if isinstance(width, str) else int(width)
    return len(text) + (len(text.splitlines()) + 1) * max(0, each)


def wrapped(value: Any, width: int = 79, long: bool = True, wrapstring: Any = None, *_: Any, **__: Any) -> int:
    return len(str(value)) * (1 + len(wrapstring or "\n"))


def as_json(value: Any, *_: Any, indent: Any = None, separators: Any = None, **__: Any) -> int:
    if isinstance(indent, int) and indent > MAX_JSON_INDENT:
        raise failed(f"The chat template indents JSON by {indent}; at most {MAX_JSON_INDENT} is allowed.")
    if (isinstance(indent, str) and len(indent) > MAX_JSON_INDENT) or any(len(one) > 16 for one in separators or ()):
        raise failed("The chat template writes JSON with separators that are too long.")
    return weight(value)


def rounded(value: Any, precision: int = 0, *_: Any, **__: Any) -> int:
    if abs(precision) > MAX_PRECISION:
        raise failed(f"The chat template rounds to {precision} places; at most {MAX_PRECISION} are allowed.")
    return 0


FILTERS: dict[str, Size] = {
    "center": lambda value, width=80: padded(str(value), width),
    "replace": lambda value, old, new, count=None: replaced(str(value), str(old), str(new), count),
    "format": lambda value, *args, **kwargs: percent(str(value), kwargs or args),
    "indent": indented,
    "wordwrap": wrapped,
    "tojson": as_json,
    "round": rounded,
    "batch": lambda value, count, fill_with=None: count if fill_with is not None else 0,
    "slice": lambda value, slices, fill_with=None: slices,
}
# Filters that convert any value to text.
READERS = (
    "capitalize", "center", "e", "escape", "forceescape", "format", "indent", "lower", "pprint", "replace", "safe",
    "string", "striptags", "title", "trim", "truncate", "upper", "urlencode", "wordcount", "wordwrap", "xmlattr",
)  # fmt: skip
