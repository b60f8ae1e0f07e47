"""Parts: the objects of a model by path, and a description of each.

Thread: any; pure. In: a model of engine/models, whose parts may be empty. Out: path -> object, in the order of
construction; and a line of text for an object or a configuration. The text comes from the object's attributes, so
this module needs no change for a new kind of part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, takewhile
from typing import Any

from engine.kernels.gemm.weight import Weight
from engine.kernels.moe.weight import ExpertsWeight
from engine.weights.table import FLOATS, Table, Wanted, parts_of

ROOMS = ("engine.layers.", "engine.models.", "engine.encoders.", "engine.pooling.")
FORMS = (Weight, ExpertsWeight)
MOST = 6  # runs of equal shapes that are listed separately


def objects_of(root: Any) -> dict[str, Any]:
    """Path -> object, for every part below the root; an object with several paths appears under the first."""
    found: dict[str, Any] = {}
    seen = {id(root)}

    def visit(path: str, value: Any) -> None:
        for name, below in _items(value):
            where = f"{path}.{name}" if path else name
            if id(below) in seen or not (isinstance(below, list | tuple | Mapping) or _is_part(below)):
                continue
            seen.add(id(below))
            if _is_part(below):
                found[where] = below
            visit(where, below)

    visit("", root)
    return found


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    """The (name, value) pairs of an object, a list or a mapping."""
    if isinstance(value, Mapping):
        yield from ((str(name), below) for name, below in value.items())
    elif isinstance(value, list | tuple):
        yield from ((str(number), below) for number, below in enumerate(value))
    else:
        slots = [name for kind in reversed(type(value).__mro__) for name in getattr(kind, "__slots__", ())]
        names = [*slots, *getattr(value, "__dict__", {})]
        held = [(name.strip("_"), getattr(value, name)) for name in names if hasattr(value, name)]
        yield from sorted(held, key=lambda one: isinstance(one[1], Mapping))  # mappings last: their values have paths


def _is_part(value: Any) -> bool:
    kind = type(value)
    frozen = getattr(getattr(kind, "__dataclass_params__", None), "frozen", False)  # a configuration
    return kind.__module__.startswith(ROOMS) and not frozen and not isinstance(value, type | Weight | ExpertsWeight)


def modules_of(table: Table, model: Any) -> dict[int, tuple[str, ...]]:
    """id() of each part -> names of the checkpoint's modules that fill it; * is a layer, # an expert."""
    return {id(part): row.names for row, _, part in parts_of(table, model)}


def line_of(part: Any, modules: Sequence[str]) -> str:
    """A part's class and the checkpoint tensors that fill it."""
    said = [type(part).__name__]
    expects = part.expects() if hasattr(part, "fill") else {}
    said += [f"{kind} {_shapes(pieces)}" for kind, pieces in expects.items()]
    if forms := _forms(part):
        said.append(f"stored as {forms}")
    if modules:
        said.append(f"from {_joined(modules)}")
    return "; ".join(said)


def held_of(part: Any) -> str:
    """The form in which a filled part holds its matrix; "": the part has none."""
    weight = getattr(part, "weight", None)
    return f"{type(weight).__name__} of {weight.num_bytes:,} bytes" if isinstance(weight, FORMS) else ""


def fields_of(config: Any, left_out: Sequence[str] = ()) -> str:
    """The fields of a configuration that differ from the defaults."""
    return ", ".join(
        f"{field.name}={_value(value)}"
        for field in dataclasses.fields(config)
        if field.name not in left_out and (value := getattr(config, field.name)) not in (field.default, {}, ())
    )


def _value(value: Any) -> str:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return f"({fields_of(value)})"
    return f"{value:.6g}" if isinstance(value, float) else repr(value) if isinstance(value, str) else str(value)


def _forms(part: Any) -> str:
    """The quantised forms of a part's pieces in the checkpoint."""
    stored = [getattr(piece, "form", "floats") for piece in getattr(getattr(part, "scheme", None), "pieces", ())]
    return ", ".join(dict.fromkeys(stored))


def _joined(names: Sequence[str]) -> str:
    """Names with their common prefix factored out: "self_attn.{q_proj, k_proj}"."""
    split = [name.split(".") for name in names]
    alike = list(takewhile(lambda words: len(set(words)) == 1, zip(*(words[:-1] for words in split))))
    if len(names) == 1 or not alike:
        return ", ".join(names)
    common = ".".join(words[0] for words in alike)
    return f"{common}.{{{', '.join(name.removeprefix(f'{common}.') for name in names)}}}"


def _shapes(pieces: Sequence[Wanted | None]) -> str:
    """The shapes of pieces; equal shapes are counted."""
    runs = [(one, len(list(run))) for one, run in groupby(_shape(piece) for piece in pieces)]
    if len(runs) > MOST:  # experts: gate, up, gate, up ...
        kinds = list(dict.fromkeys(one for one, _ in runs))
        runs = [(kind, sum(many for one, many in runs if one == kind)) for kind in kinds]
    return " + ".join(one if many == 1 else f"{many} x {one}" for one, many in runs)


def _shape(piece: Wanted | None) -> str:
    if piece is None:
        return "none"
    dtype = "" if piece.dtypes == FLOATS else f" {str(piece.dtypes[0]).removeprefix('torch.')}"
    return f"{list(piece.shape)}{dtype}"
