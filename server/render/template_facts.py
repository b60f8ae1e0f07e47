"""Expectations of a chat template about its messages, read from its syntax tree before the first request.

Owner: none, pure functions. In: jinja2's tree. Out: TemplateFacts. A template that loops over a message's content takes
parts; one that only prints it takes a string. Content is followed through `set`, filters, slices and macro arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jinja2 import nodes


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """The facts about one template."""

    content_format: Literal["string", "openai"]
    asks_for_string: bool  # tests `content is string`: a string is passed unchanged even if the template takes parts
    asks_for_none: bool  # tests `content is none`: null content is passed as null
    knows_developer: bool  # names the developer role


def read_facts(tree: nodes.Template) -> TemplateFacts:
    """Read all facts at once."""
    names = _content_names(tree)
    loops = any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))
    tests = {test.name for test in tree.find_all(nodes.Test) if _is_content(test.node, names)}
    texts = {const.value for const in tree.find_all(nodes.Const) if isinstance(const.value, str)}
    return TemplateFacts(
        content_format="openai" if loops else "string",
        asks_for_string="string" in tests,
        asks_for_none="none" in tests,
        knows_developer="developer" in texts,
    )


def _content_names(tree: nodes.Template) -> frozenset[str]:
    """Variables that hold a message's content: assigned from it, or macro parameters to which it is passed."""
    macros = {macro.name: [arg.name for arg in macro.args] for macro in tree.find_all(nodes.Macro)}
    names: frozenset[str] = frozenset()
    while True:
        found = set(names)
        for assign in tree.find_all(nodes.Assign):
            if isinstance(assign.target, nodes.Name) and _is_content(assign.node, names):
                found.add(assign.target.name)
        for call in tree.find_all(nodes.Call):
            if not isinstance(call.node, nodes.Name) or call.node.name not in macros:
                continue
            parameters = macros[call.node.name]
            found.update(name for name, value in zip(parameters, call.args) if _is_content(value, names))
            found.update(pair.key for pair in call.kwargs if _is_content(pair.value, names))
        if found == names:
            return names
        names = frozenset(found)


def _is_content(node: nodes.Node | None, names: frozenset[str]) -> bool:
    if isinstance(node, nodes.Name):
        return node.name in names
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        if isinstance(node.arg, nodes.Const):
            return node.arg.value == "content"
        return isinstance(node.arg, nodes.Slice) and _is_content(node.node, names)
    if isinstance(node, nodes.Filter):
        return node.name not in ("length", "count", "items") and _is_content(node.node, names)
    return False
