"""Start an answer's grammar after the reasoning, if the model thinks first.

Owner: none, pure functions; called in the pool. In: the grammar of the answer itself, the model's reasoning format and
the state of reasoning at the end of the prompt. Out: the same grammar with a later start. If the end marker is a token,
the row is free until its id comes. If markers are plain text or several tokens, or harmony's channels, a second grammar
is wrapped around that of the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from engine.base.grammar import Grammar, GrammarSpec
from server.errors import not_here
from server.output.reasoning import ReasoningFormat, State
from server.structure.call_values import spelled
from server.structure.structure import Structure

HARMONY = """\
start: thought* <|channel|> "final" (" "? <|constrain|> "json")? <|message|> @answer
thought: <|channel|> "analysis" <|message|> TEXT <|end|> <|start|> "assistant"
TEXT: /(?s:.*)/
"""


def behind_thinking(spec: GrammarSpec, form: ReasoningFormat, state: State, ids: Mapping[str, int]) -> GrammarSpec:
    """The grammar after the reasoning of a format, as prompts spell it; `ids`: token ids of the markers.

    A grammar that defines its own start is returned unchanged, unless it sleeps until a call. If it contains calls, the
    marker of a call that ends the reasoning starts it too.
    """
    if state == "closed" or not form.ends or (spec.starts and spec.starts != spec.fed) or spec.around:
        return spec
    ends = tuple(ids[text] for text in form.ends if text in ids)
    calls = tuple(ids[text] for text in form.stops if text in ids and f"<[{ids[text]}]>" in spec.text)
    begins = tuple(dict.fromkeys(first for text in form.begins if (first := first_of(text, ids)) is not None))
    must_end = state == "open" or form.always
    if ends and (must_end or begins) and not form.suffix:
        return replace(spec, starts=(*ends, *calls), fed=calls, opens=() if must_end else begins)
    rest = " /[^>]*>/" if form.suffix else ""
    lines = [f"thought[lazy]: /(?s:.*)/ ({_any_of(form.ends, ids)}){rest}"]
    if any(first_of(text, ids) is not None for text in form.ends):  # TEXT ends before a token
        lines = [f"thought: TEXT ({_any_of(form.ends, ids)}){rest}", "TEXT: /(?s:.*)/"]
    lines.append("start: " + ("thought" if must_end else f"(({_any_of(form.begins, ids)}) thought)?") + " @answer")
    return replace(spec, around="\n".join(lines), starts=(), fed=())


def first_of(marker: str, ids: Mapping[str, int]) -> int | None:
    """The token that a marker begins with; None if the marker begins with letters."""
    return next((ids[name] for name in sorted(ids, key=len, reverse=True) if marker.startswith(name)), None)


def _any_of(markers: tuple[str, ...], ids: Mapping[str, int]) -> str:
    return " | ".join(f"({spelled(text, ids)})" for text in markers)


FREE = Structure(b"free", lambda: GrammarSpec("free", ""), "thinking_token_budget")


def with_budget(grammar: Grammar, budget: int) -> Grammar | None:
    """The grammar preceded by at most `budget` tokens of reasoning; None if nothing remains to be enforced.

    The budget is enforced by forcing the end marker, so the marker must be a token.
    """
    spec = grammar.spec
    if spec.around:
        raise not_here(FREE.param, "thinking_token_budget: the end of this model's reasoning is no token of its own")
    if spec.starts and spec.starts != spec.fed:
        return replace(grammar, spec=replace(spec, budget=budget))
    return None if spec.kind == "free" else grammar


def in_harmony(spec: GrammarSpec) -> GrammarSpec:
    """The grammar for the final message of a harmony answer."""
    return spec if spec.starts or spec.around else replace(spec, around=HARMONY)
