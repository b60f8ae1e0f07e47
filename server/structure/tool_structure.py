"""Tools and tool_choice as a Structure: it enforces required calls, and the schemas of strict tools.

Owner: loop for `tool_structure`, the pool for what it makes. In: the tools as every dialect reads them, the choice, and
the model's format. Out: a Structure whose grammar has the format's own shape (structure/call_shapes.py), so the parser
of free calls reads these too. For tools without `strict`, what cannot be enforced is left out and reported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from engine.base.grammar import GrammarSpec
from server.errors import not_here
from server.flags.config import LimitsConfig
from server.output.parser import Parsers
from server.render.tools import ToolPlace
from server.structure.call_shapes import grammar_of, wake_of
from server.structure.call_values import Tool
from server.structure.harmony_calls import harmony_calls
from server.structure.schema_faults import too_complex, wrong
from server.structure.structure import Structure, content_key, relaxed, schema_text

ANY_OBJECT = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class Calls:
    """What a request demands of calls."""

    may: bool = True  # a call may come
    must: bool = False  # a call must come
    only: frozenset[str] | None = None  # only these tools; None: any
    most: int = 0  # the most calls; 0: no limit


def tool_structure(
    parsers: Parsers,
    tools: Sequence[Mapping[str, Any]],
    places: Sequence[ToolPlace],
    calls: Calls,
    limits: LimitsConfig,
    answer: Structure | None = None,
) -> Structure | None:
    """The structure that constrains the answer; `answer` itself if no call needs to be constrained.

    `answer` is what the request demands of answers (response_format): a model that may call writes either calls or a
    document that follows its schema. With a pattern, a choice or a grammar there are no calls, as in vLLM.
    """
    if not tools or not (calls.must or any(place.strict for place in places) or answer is not None):
        return answer
    param = "tool_choice" if calls.must else "tools" if answer is None else answer.param
    if parsers.written_tools is None and not parsers.reads_calls:
        if not calls.must and (answer is not None or parsers.tools_name == "none"):  # calls remain text
            return answer
        raise not_here(
            param, f"{param}: this server cannot enforce a schema on the calls of this model; send auto, without strict"
        )
    listed = [
        (tool["function"]["name"], tool["function"].get("parameters") or ANY_OBJECT, *place)
        for tool, place in zip(tools, places, strict=True)
        if calls.only is None or tool["function"]["name"] in calls.only
    ]
    other = None if calls.must else answer
    try:
        key = content_key(parsers.tools_name, listed, calls.must, calls.most, other and other.key.hex())
    except (TypeError, ValueError):  # numbers of more than 64 bits
        raise wrong("tools", "hold a number out of range") from None
    return Structure(key, partial(_make, parsers, listed, calls, other, param, limits), param)


def _make(
    parsers: Parsers,
    listed: list[tuple[str, Any, bool, str]],
    calls: Calls,
    answer: Structure | None,
    param: str,
    limits: LimitsConfig,
) -> GrammarSpec:
    """Make the grammar (pool)."""
    dropped: list[str] = []

    def text_of(strict: bool, schema: Any, path: str) -> str:
        if strict:
            return schema_text(schema, path, limits)
        text, left_out = relaxed(schema, path, limits)
        dropped.extend(left_out)
        return text

    def leave(strict: bool, keyword: str, path: str) -> None:
        if strict:
            raise wrong(path, "cannot be enforced in this model's form of calls; leave it out")
        dropped.append(keyword)

    tools = [
        Tool(name, parameters, path, partial(text_of, strict), partial(leave, strict))
        for name, parameters, strict, path in listed
    ]
    spec = None if answer is None else answer.make()
    if spec is not None and spec.kind != "schema":
        return spec
    if parsers.reads_calls:
        made = harmony_calls(tools, must=calls.must, answer="" if spec is None else spec.text)
        return replace(made, relaxed=tuple(sorted(set(dropped))))
    assert parsers.written_tools is not None
    must = calls.must or spec is not None
    try:
        text = grammar_of(parsers.written_tools, parsers.markers.ids, tools, must=must, most=calls.most)
    except RecursionError:  # from $ref, which no limit on nesting counts
        raise too_complex(param, "a tool's parameters nest too deeply, or are made of themselves alone") from None
    if text is None and spec is not None:
        return spec
    if text is None:
        raise not_here(
            param,
            f"{param}: calls in the form {parsers.tools_name} cannot follow a schema inside free text, because "
            "a grammar cannot detect where a call begins; send tool_choice required, or tools without strict",
        )
    if spec is not None:
        text = text.replace("start: ", "start: answer | ", 1) + f"\nanswer: %json {spec.text}"
    wake = None if must else wake_of(parsers.written_tools, parsers.markers.ids)
    starts = () if wake is None else (wake,)
    return GrammarSpec("lark", text, starts=starts, fed=starts, relaxed=tuple(sorted(set(dropped))))
