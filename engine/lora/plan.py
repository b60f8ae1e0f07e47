"""Plan: where each tensor of an adapter's file goes, decided from names, shapes and configuration alone.

In: the header of the weights file. Out: for each tensor its site, and the sizes of all sites, before anything is
allocated. Every tensor finds a place, or AdapterError names the tensors. Thread: any.

Parameters of all experts have A [experts * rank, in], expert by expert, and B [out, rank * experts], rank by rank.
PEFT before 0.19 exchanged in and out for parameters that transformers saves as [experts, out, in].
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from engine.base.errors import AdapterError
from engine.lora.config import AdapterConfig
from engine.lora.targets import ExpertSpot, ExpertsTarget, LinearTarget, Spot, StackedSpot, Targets
from engine.weights.files import TensorInfo
from engine.weights.names import compact

PREFIX = "base_model.model."
HALF = re.compile(r"(.+)\.lora_([AB])\.weight")
COPY = re.compile(r"(.+?)(?:\.base_layer|\.modules_to_save)?\.(weight|bias)")
NEST = ".base_layer"
FLOATS = ("F32", "F16", "BF16")
SWAPPED_BEFORE = (0, 19)  # PEFT
NAMED = 10  # tensors that an error names


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor's part in a site."""

    target: LinearTarget | ExpertsTarget
    pieces: tuple[int, ...]
    expert: int | None  # None: a linear layer, or all experts
    half: str  # "a" or "b": the matrix in memory
    rank: int
    scale: float  # of b
    swapped: bool = False  # the tensor is the other half, transposed


@dataclass(slots=True)
class Plan:
    """All tensors of a file."""

    pieces: dict[str, Piece] = field(default_factory=dict)  # by the tensor's name
    ranks: dict[str, int] = field(default_factory=dict)  # the largest rank of each site, by its path
    targets: dict[str, LinearTarget | ExpertsTarget] = field(default_factory=dict)
    unread: set[str] = field(default_factory=set)  # tensors of layers that forward never reads
    copies: dict[str, str] = field(default_factory=dict)  # tensors that must equal the base's -> name in the base

    def num_bytes(self, itemsize: int) -> int:
        """Bytes of all sites."""
        total = 0
        for path, rank in self.ranks.items():
            target = self.targets[path]
            experts = target.num_experts if isinstance(target, ExpertsTarget) else 1
            total += experts * rank * (len(target.rows) * target.in_features + sum(target.rows)) * itemsize
        return total


@dataclass(slots=True)
class _Module:
    """The two tensors of a module."""

    name: str  # the module's path in the model that was trained
    tensors: dict[str, tuple[str, TensorInfo]] = field(default_factory=dict)  # "A" and "B": name in the file, info


def plan_of(
    tensors: Mapping[str, TensorInfo], config: AdapterConfig, targets: Targets, allowed: Collection[str] = ()
) -> Plan:
    """The plan; `allowed`: last components of the modules that may have adapters, (): all."""
    plan, left_over = Plan(), []
    modules: dict[str, _Module] = {}
    for name, info in tensors.items():
        half, short = HALF.fullmatch(name), name.removeprefix(PREFIX)
        if half is not None:
            module = modules.setdefault(half[1], _Module(half[1].removeprefix(PREFIX).replace(NEST, "")))
            module.tensors[half[2]] = name, info
        elif ".lora_" not in name and (copy := COPY.fullmatch(short)) is not None:
            plan.copies[name] = f"{copy[1]}.{copy[2]}"
        else:
            left_over.append(name)
    _refuse("have no place: only A and B of linear layers and of experts are served", left_over)
    alone = [name for each in modules.values() if len(each.tensors) == 1 for name, _ in each.tensors.values()]
    _refuse("have no other half: each module needs lora_A and lora_B", alone)
    for each in modules.values():
        spot = targets.find(each.name)
        if spot is None and targets.is_unread(each.name):
            plan.unread |= {name for name, _ in each.tensors.values()}
        elif spot is None:
            left_over += [name for name, _ in each.tensors.values()]
        else:
            _add(plan, each, spot, config)
    _refuse("have no place: the model has no such linear layer", left_over)
    if not plan.pieces:
        raise AdapterError("the file holds no lora_A and lora_B")
    _check_allowed(modules.values(), allowed)
    _check_once(plan)
    return plan


def _add(plan: Plan, module: _Module, spot: Spot | ExpertSpot | StackedSpot, config: AdapterConfig) -> None:
    """Adds a module's two tensors to the plan."""
    (a_name, a), (b_name, b) = module.tensors["A"], module.tensors["B"]
    for name, info in module.tensors.values():
        if info.dtype not in FLOATS:
            raise AdapterError(f"{name} has dtype {info.dtype}; readable are {', '.join(FLOATS)}")
        if len(info.shape) != 2:
            raise AdapterError(f"{name} has shape {list(info.shape)}; a matrix is needed")
    target: LinearTarget | ExpertsTarget
    pieces: tuple[int, ...]
    swapped, expert, count, trained = False, None, 1, module.name
    if isinstance(spot, StackedSpot):
        target, swapped = _chosen(module, spot, config)
        pieces, count = tuple(range(len(target.rows))), target.num_experts
        trained = module.name if module.name.endswith(target.kind) else f"{module.name}.{target.kind}"
    elif isinstance(spot, ExpertSpot):
        target, pieces, expert = spot.target, (spot.piece,), spot.expert
    else:
        target, pieces = spot.target, spot.pieces
    rank, rows = config.rank_of(trained), sum(target.rows[piece] for piece in pieces)
    inner, outer = (rows, target.in_features) if swapped else (target.in_features, rows)
    for name, info, shape in ((a_name, a, (count * rank, inner)), (b_name, b, (outer, count * rank))):
        if info.shape != shape:
            raise AdapterError(f"{name} has shape {list(info.shape)}; rank {rank} and the model ask for {list(shape)}")
    scale = config.scale_of(trained)
    for name, half in ((a_name, "b" if swapped else "a"), (b_name, "a" if swapped else "b")):
        plan.pieces[name] = Piece(target, pieces, expert, half, rank, scale, swapped)
    plan.targets[target.path] = target
    plan.ranks[target.path] = max(rank, plan.ranks.get(target.path, 0))


def _chosen(module: _Module, spot: StackedSpot, config: AdapterConfig) -> tuple[ExpertsTarget, bool]:
    """The parameter of all experts that the shapes fit, and whether PEFT exchanged its sizes."""
    (a_name, a), (_, b) = module.tensors["A"], module.tensors["B"]
    sizes = a.shape[1], b.shape[0]
    fits = []
    for target in spot.targets:
        straight = target.in_features, sum(target.rows)
        fits += [(target, swapped) for swapped in (False, True) if sizes == (straight[::-1] if swapped else straight)]
    if len(fits) > 1:
        fits = [(target, swapped) for target, swapped in fits if swapped is _is_swapped(config, target, a_name)]
    if len(fits) == 1:
        return fits[0]
    said = " or ".join(f"{target.kind} [{target.in_features} -> {sum(target.rows)}]" for target in spot.targets)
    raise AdapterError(f"{a_name} and its lora_B map {sizes[0]} to {sizes[1]} values; the experts have {said}")


def _is_swapped(config: AdapterConfig, target: ExpertsTarget, name: str) -> bool:
    """Whether the PEFT that saved the file exchanged in and out, for experts whose shapes leave it open."""
    if target.order == "in, out as marked":
        return False
    if config.version is None or target.order == "in, out":
        raise AdapterError(
            f"{name}: the experts have as many inputs as results, so the file does not say which matrix reads the "
            "inputs; give the peft_version that trained it in adapter_config.json, or train experts one by one"
        )
    return config.version < SWAPPED_BEFORE


def _check_allowed(modules: Collection[_Module], allowed: Collection[str]) -> None:
    """Refuses modules for which --lora-target-modules makes no room."""
    refused = [each.name for each in modules if allowed and each.name.rpartition(".")[2] not in allowed]
    _refuse(f"are adapted; --lora-target-modules allows {', '.join(sorted(allowed))}", refused)


def _check_once(plan: Plan) -> None:
    """Refuses two tensors for one place, under two spellings of its name."""
    seen: dict[tuple[str, int, str], dict[int | None, str]] = {}  # site, piece and half -> expert -> tensor
    for name, piece in plan.pieces.items():
        for each in piece.pieces:
            there = seen.setdefault((piece.target.path, each, piece.half), {})
            other = next(iter(there.values()), "") if piece.expert is None else there.get(piece.expert, there.get(None))
            if other:
                raise AdapterError(f"{other} and {name} have the same place; the file holds one adapter twice")
            there[piece.expert] = name


def _refuse(why: str, names: list[str]) -> None:
    """Raises AdapterError with the first names, if there are any."""
    if names:
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        raise AdapterError(f"{compact(names[:NAMED])}{more} {why}")
