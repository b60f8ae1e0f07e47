"""assign: gives each linear layer of a model its scheme, before the layer says which tensors it expects.

Owner: the thread that builds the model. In: a model whose parts are empty, its configuration, the headers of its files.
Out: the parts' `scheme`, changed in place. The headers decide which modules are quantised; the configuration adds what
headers do not say. With random weights the configuration alone decides.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from engine.base.errors import ConfigError
from engine.checkpoint.section import Section
from engine.quant.base import Dialect, Expected, Headers, Quantised, Stored
from engine.quant.dialects import DIALECTS
from engine.quant.names import USUAL
from engine.quant.online import ONLINE
from engine.quant.stacked import stacked
from engine.weights.files import Shard, TensorInfo
from engine.weights.names import compact
from engine.weights.table import Table, Wanted, Weighted, parts_of

if TYPE_CHECKING:
    from engine.base.model_config import ModelConfig

log = logging.getLogger("omniloop.engine")

NAMED_FAULTS = 5  # most faults listed in an error
FLOATS: Headers = {"weight": TensorInfo((), "BF16", 0, 0)}  # headers of unquantised experts in one module
CODES = {
    "weight_packed",
    "qweight",
    "weight_scale",
    "weight_scale_inv",
    "scales",
    "qscale_weight",
    "weight.absmax",
    "SCB",
}


def assign(model: Weighted, table: Table, config: ModelConfig, shards: Sequence[Shard] | None) -> None:
    """Gives each linear layer of the model the scheme of its modules; `shards`: None with random weights."""
    settings = config.raw.get("quantization_config")
    if settings is None:
        return
    dialect = DIALECTS[settings["quant_method"]](Section(settings, "config.json: quantization_config"))
    found = None if shards is None else modules_of(table, shards)
    part: Any  # a part with a scheme is a layer of engine/layers/linear.py, or Experts
    any_quantised, listed = False, []
    wrong: dict[str, list[str]] = {}  # error text -> modules
    for row, names, part in parts_of(table, model):
        if hasattr(part, "stacked"):
            if found is not None:
                part.stacked = stacked(part, dialect, names[0], found.get(names[0], {}))
            if not hasattr(part, "scheme") and not part.stacked_codes:
                part.making = dialect.stored(names[0], part.in_features, FLOATS)
            any_quantised |= part.stacked_codes > 0
        if not hasattr(part, "scheme"):
            if "weight" in part.expects():  # else the codes belong to another part
                _refuse_codes(names, found)
            continue
        if not part.expects() or (getattr(part, "in_floats", False) and not _with_codes(names, found)):
            continue
        if stored := getattr(part, "stored", ()):  # the index of the module for each piece
            names = [names[number] for number in stored]
        pieces = tuple(_stored(dialect, name, part.in_features, found, wrong) for name in names)
        if any(piece is not None for piece in pieces):
            part.scheme = Quantised(pieces, tuple(names))
            any_quantised = True
            if "#" in row.names[0] and not wrong:
                _refuse_unlike(names, part.expects(), found)
        if found is not None:
            listed += [name for name, piece in zip(names, pieces) if piece and _is_listed(dialect, name, part)]
    if wrong:
        lines = [f"{compact(names)}: {said}" for said, names in wrong.items()]
        raise ConfigError(
            "; ".join(lines[:NAMED_FAULTS] + [f"and {len(lines[NAMED_FAULTS:])} more"] * (len(lines) > NAMED_FAULTS))
        )
    if settings["quant_method"] == ONLINE and not any_quantised:
        raise ConfigError(
            f"--quantization fp8: {config.architecture} has no layers that are quantised while they are read; leave "
            "the flag out"
        )
    if listed:
        log.warning(
            "%d modules that the configuration leaves out of quantisation are codes in the files, and are read as "
            "codes: %s",
            len(listed),
            compact(listed),
        )


def _stored(
    dialect: Dialect, name: str, columns: int, found: Mapping[str, Headers] | None, wrong: dict[str, list[str]]
) -> Stored | None:
    try:
        return dialect.stored(name, columns, None if found is None else found.get(name, {}))
    except ConfigError as error:
        wrong.setdefault(str(error), []).append(name)
        return None


def _is_listed(dialect: Dialect, name: str, part: Any) -> bool:
    """Whether the configuration lists this module as not quantised."""
    return name not in USUAL and dialect.stored(name, part.in_features, None) is None


def _refuse_unlike(names: Sequence[str], expected: Expected, found: Mapping[str, Headers] | None) -> None:
    """Refuses a layer whose experts have different tensors, because all experts form one weight. Experts without any
    tensor count as missing."""
    alike: dict[frozenset[tuple[str, Wanted]], list[str]] = {}
    for number, name in enumerate(names):
        if found is not None and name not in found:
            continue
        form = frozenset((kind, wanted) for kind, pieces in expected.items() if (wanted := pieces[number]) is not None)
        alike.setdefault(form, []).append(name)
    if len(alike) > 1:
        lines = [f"{compact(experts)} as {_listed(form)}" for form, experts in alike.items()]
        raise ConfigError(
            f"experts of one layer are stored in unlike forms: {'; '.join(lines)}; one form for all experts of a layer "
            "is read: fetch the files again, or quantise the checkpoint again with all of them alike"
        )


def _listed(form: Iterable[tuple[str, Wanted]]) -> str:
    return ", ".join(f"{kind} {list(wanted.shape)}" for kind, wanted in sorted(form))


def _refuse_codes(names: Sequence[str], found: Mapping[str, Headers] | None) -> None:
    """Refuses quantised embeddings and norms, which are read as floats."""
    if quantised := _with_codes(names, found):
        raise ConfigError(
            f"{compact(quantised)}: these weights are quantised; codes are read in linear layers, experts and routers "
            "alone: quantise the checkpoint again without these"
        )


def _with_codes(names: Sequence[str], found: Mapping[str, Headers] | None) -> list[str]:
    """The modules whose tensors are codes in the files; none with random weights."""
    return [name for name in names if found is not None and CODES & found.get(name, {}).keys()]


def modules_of(table: Table, shards: Sequence[Shard]) -> dict[str, Headers]:
    """Canonical module name -> its tensors' headers by kind."""
    found: dict[str, dict] = {}
    for shard in shards:
        for name, info in shard.tensors.items():
            module, kind = split(table.canonical(name))
            found.setdefault(module, {})[kind] = info
    return dict(found)


def split(name: str) -> tuple[str, str]:
    """A tensor's name -> module and kind; tensors below a weight belong to the weight's module."""
    module, found, below = name.partition(".weight.")
    if found:
        return module, f"weight.{below}"
    module, _, kind = name.rpartition(".")
    return module, kind
