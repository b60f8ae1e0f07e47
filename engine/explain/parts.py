"""Parts: the objects that a model is made of, by their paths, and what each of them says of itself.

Thread: any; pure. In: a model of engine/models, whose parts may be empty. Out: path -> object, in the order in which
the model's constructors made them; and for an object, or a configuration, a line of text. Only what objects know is
said, so a new kind of part needs no line here.
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
MOST = 6  # runs of pieces that are named one by one


def objects_of(root: Any) -> dict[str, Any]:
    """Every object below the root that belongs to its parts; the first path of each."""
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
    """What an object, a list or a mapping holds, by name."""
    if isinstance(value, Mapping):
        yield from ((str(name), below) for name, below in value.items())
    elif isinstance(value, list | tuple):
        yield from ((str(number), below) for number, below in enumerate(value))
    else:
        slots = [name for kind in reversed(type(value).__mro__) for name in getattr(kind, "__slots__", ())]
        names = [*slots, *getattr(value, "__dict__", {})]
        held = [(name.strip("_"), getattr(value, name)) for name in names if hasattr(value, name)]
        yield from sorted(held, key=lambda one: isinstance(one[1], Mapping))  # tables name what has a name already


def _is_part(value: Any) -> bool:
    kind = type(value)
    frozen = getattr(getattr(kind, "__dataclass_params__", None), "frozen", False)  # a configuration
    return kind.__module__.startswith(ROOMS) and not frozen and not isinstance(value, type | Weight | ExpertsWeight)


def modules_of(table: Table, model: Any) -> dict[int, tuple[str, ...]]:
    """By id() of each part the modules of the checkpoint that it is filled from; * is a layer, # an expert."""
    return {id(part): row.names for row, _, part in parts_of(table, model)}


def line_of(part: Any, modules: Sequence[str]) -> str:
    """What a part is and which tensors it takes of the checkpoint."""
    said = [type(part).__name__]
    expects = part.expects() if hasattr(part, "fill") else {}
    said += [f"{kind} {_shapes(pieces)}" for kind, pieces in expects.items()]
    if forms := _forms(part):
        said.append(f"stored as {forms}")
    if modules:
        said.append(f"from {_joined(modules)}")
    return "; ".join(said)


def held_of(part: Any) -> str:
    """In which form a part that is filled holds its matrix; "" where it has none."""
    weight = getattr(part, "weight", None)
    return f"{type(weight).__name__} of {weight.num_bytes:,} bytes" if isinstance(weight, FORMS) else ""


def fields_of(config: Any, left_out: Sequence[str] = ()) -> str:
    """The fields of a configuration in which it differs from what most models have."""
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
    """Names, what all of them begin with once: "self_attn.{q_proj, k_proj}"."""
    split = [name.split(".") for name in names]
    alike = list(takewhile(lambda words: len(set(words)) == 1, zip(*(words[:-1] for words in split))))
    if len(names) == 1 or not alike:
        return ", ".join(names)
    common = ".".join(words[0] for words in alike)
    return f"{common}.{{{', '.join(name.removeprefix(f'{common}.') for name in names)}}}"


def _shapes(pieces: Sequence[Wanted | None]) -> str:
    """The shapes of pieces, the same ones counted."""
    runs = [(one, len(list(run))) for one, run in groupby(_shape(piece) for piece in pieces)]
    if len(runs) > MOST:  # of experts: gate, up, gate, up ...
        kinds = list(dict.fromkeys(one for one, _ in runs))
        runs = [(kind, sum(many for one, many in runs if one == kind)) for kind in kinds]
    return " + ".join(one if many == 1 else f"{many} x {one}" for one, many in runs)


def _shape(piece: Wanted | None) -> str:
    if piece is None:
        return "none"
    dtype = "" if piece.dtypes == FLOATS else f" {str(piece.dtypes[0]).removeprefix('torch.')}"
    return f"{list(piece.shape)}{dtype}"
