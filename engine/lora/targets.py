"""Targets: the matrices of a model that an adapter may change, and their names in adapters' files.

Owner: frozen after `targets_of`, which reads a model's weight table. Any thread may read it. In: names of modules in
the module tree of any release of transformers. Out: the layer in the model's own tree, and the pieces of the layer.

    model.language_model.layers.3.self_attn.q_proj -> layers.3.attention.qkv, piece 0
    model.layers.3.mlp.experts.7.down_proj         -> layers.3.experts.down, piece 0, expert 7
    model.layers.3.mlp.experts                     -> layers.3.experts.gate_up or .down: the shapes decide
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from engine.kernels.activation import Activation
from engine.layers.embed import Head
from engine.layers.linear import GatedLinear, Linear
from engine.layers.moe import Experts
from engine.layers.padded import PaddedGated, PaddedLinear
from engine.models.base.model import Model
from engine.quant.base import Arrange
from engine.quant.gains import Gain, times
from engine.weights.table import Table, addressed

# Modules of other releases that join modules of the table: last components -> name.
JOINED = {("q_proj", "k_proj", "v_proj"): "qkv_proj", ("gate_proj", "up_proj"): "gate_up_proj"}
# Matrices of an expert in other releases: product and piece.
OF_AN_EXPERT = {
    "gate_proj": ("gate_up", 0),
    "up_proj": ("gate_up", -1),
    "down_proj": ("down", 0),
    "w1": ("gate_up", 0),
    "w3": ("gate_up", -1),
    "w2": ("down", 0),
}
IN_ONE = {"gate_up_proj": "gate_up", "up_proj": "gate_up", "down_proj": "down"}  # parameters of all experts
BLOCK = re.compile(r"(.*layers\.\d+)\.\w+\.experts")
EXPERT = re.compile(r"(.+\.experts)\.(\d{1,6})\.(\w+)")
KINDS = (Linear, GatedLinear, Head, PaddedLinear, PaddedGated)
BASE = ".base_layer"  # the submodule with the matrix, in checkpoints with adapters of their own
STRIPS = 4  # further prefixes that a name may have


@dataclass(frozen=True, slots=True, eq=False)
class LinearTarget:
    """A linear layer."""

    path: str
    in_features: int
    rows: tuple[int, ...]  # of each piece
    arrange: Arrange | None
    gains: tuple[Gain, ...] | None

    def arranged(self, piece: int, b: Tensor) -> Tensor:
        """B of a piece, float32 [rows, rank], with its rows in the layer's order, times the layer's gains."""
        if self.gains is not None:
            b = times(b, self.gains[piece])
        return b if self.arrange is None else self.arrange(piece, b)


# Sizes after the number of experts. "in, out as marked": transformers' class has `is_transposed`, which PEFT reads.
Order = Literal["out, in", "in, out", "in, out as marked"]


@dataclass(frozen=True, slots=True, eq=False)
class ExpertsTarget:
    """The same product of all experts."""

    path: str
    kind: str  # the parameter of all experts in transformers' tree: gate_up_proj, up_proj or down_proj
    num_experts: int
    in_features: int
    rows: tuple[int, ...]  # of each piece
    interleaved: bool  # in a parameter of all experts, gate's rows and up's rows alternate
    order: Order  # of transformers' parameter


@dataclass(frozen=True, slots=True)
class Spot:
    """A module's place in a linear layer."""

    target: LinearTarget
    pieces: tuple[int, ...]  # several: the module joins them


@dataclass(frozen=True, slots=True)
class ExpertSpot:
    """The place of a matrix of one expert."""

    target: ExpertsTarget
    piece: int
    expert: int


@dataclass(frozen=True, slots=True)
class StackedSpot:
    """The place of a parameter of all experts: one of `targets`."""

    targets: tuple[ExpertsTarget, ...]


@dataclass(slots=True, eq=False)
class Targets:
    """All targets of a model by path, and the names of their modules."""

    table: Table
    by_path: dict[str, LinearTarget | ExpertsTarget] = field(default_factory=dict)
    _modules: dict[str, Spot] = field(default_factory=dict)  # canonical name of a module
    _experts: dict[str, dict[str, ExpertsTarget]] = field(default_factory=dict)  # canonical prefix -> product -> target
    _own: dict[str, dict[str, tuple[str, int]]] = field(default_factory=dict)  # prefix -> matrix -> product, piece
    _built: set[str] = field(default_factory=set)  # first components of the names of all parts that the model has
    _left_out: bool = False  # whether the checkpoint has towers that the model does not have

    def find(self, module: str) -> Spot | ExpertSpot | StackedSpot | None:
        """The place of a module of an adapter's file; None: the model has no such linear layer."""
        for name in self._canonical(module):
            found = self._modules.get(name) or self._of_expert(name) or self._stacked(name)
            if found is not None:
                return found
        return None

    def is_unread(self, module: str) -> bool:
        """Whether forward never reads the module: a layer behind the last one that is used, or a tower that serves no
        request of this server."""
        name = next(self._canonical(module))
        left_out = self._left_out and name.partition(".")[0] not in self._built
        return left_out or self.table.ignored(f"{name}.weight")

    def _canonical(self, module: str) -> Iterator[str]:
        """The module's canonical name, then names without further prefixes."""
        name = self.table.canonical(f"{module}.weight").removesuffix(".weight")
        for _ in range(STRIPS):
            yield name
            prefix = next((each for each in ("model.", *self.table.prefixes) if name.startswith(each)), None)
            if prefix is None:
                return
            name = name.removeprefix(prefix)

    def _block(self, name: str) -> str:
        """The canonical prefix of a layer's experts, whatever the name of the block that holds them."""
        found = BLOCK.fullmatch(name)
        if name in self._experts or found is None:
            return name
        return next((known for known in self._experts if known.startswith(f"{found[1]}.")), name)

    def _of_expert(self, name: str) -> ExpertSpot | None:
        found = EXPERT.fullmatch(name)
        if found is None:
            return None
        block = self._block(found[1])
        product, piece = self._own.get(block, {}).get(found[3]) or OF_AN_EXPERT.get(found[3], ("", 0))
        target = self._experts.get(block, {}).get(product)
        if target is None or int(found[2]) >= target.num_experts:
            return None
        return ExpertSpot(target, piece % len(target.rows), int(found[2]))

    def _stacked(self, name: str) -> StackedSpot | None:
        """The place of `experts`, or of a parameter's own name below it."""
        block, _, last = name.rpartition(".")
        if last in IN_ONE:
            target = self._experts.get(self._block(block), {}).get(IN_ONE[last])
            if target is not None:
                return StackedSpot((target,))
        found = self._experts.get(self._block(name))
        return StackedSpot(tuple(found.values())) if found else None

    def add_names(self, names: list[str]) -> None:
        """Adds the names of any part."""
        self._built |= {name.partition(".")[0] for name in names}

    def add_linear(self, path: str, names: list[str], part: Linear) -> None:
        """Adds a linear layer of these modules."""
        gains = None if part.gains is None else tuple(part.gains.of_weights())
        target = LinearTarget(path, part.in_features, part.out_features, part.arrange, gains)
        self.by_path[path] = target
        names = [name.removesuffix(BASE) for name in names]
        for piece, name in enumerate(names):
            self._modules[name] = Spot(target, (piece,))
        parents = {name.rpartition(".")[0] for name in names}
        joined = JOINED.get(tuple(name.rpartition(".")[2] for name in names))
        if joined is not None and len(parents) == 1:
            self._modules.setdefault(f"{parents.pop()}.{joined}", Spot(target, tuple(range(len(names)))))

    def add_experts(self, path: str, names: list[str], part: Experts, clamped: bool) -> None:
        """Adds a product of all experts; `clamped`: their activation is gpt-oss', whose gate and up alternate."""
        interleaved = part.is_gated and (clamped or part.layout in ("by turns", "codes by turns"))
        kind = "down_proj" if part.is_down else "gate_up_proj" if part.is_gated else "up_proj"
        order: Order = "in, out" if part.layout == "turned" else "out, in"
        if clamped:
            order = "in, out as marked"
        target = ExpertsTarget(path, kind, part.num_experts, part.in_features, part.pieces, interleaved, order)
        self.by_path[path] = target
        product = IN_ONE[kind]
        found = EXPERT.fullmatch(names[0])
        block = names[0] if found is None else found[1]
        self._experts.setdefault(block, {})[product] = target
        if found is not None:
            own = self._own.setdefault(block, {})
            for piece, name in enumerate(names[: len(part.pieces)]):
                own[name.rpartition(".")[2]] = product, piece


def targets_of(model: Model) -> Targets:
    """The targets of a model, which may have no weights yet."""
    table = model.weight_table()
    targets = Targets(table, _left_out=model.config.left_out)
    part: Any
    for path, names, part in addressed(table, model):
        targets.add_names(names)
        if type(part) in KINDS and part.fold == (part.in_features,):  # no unrolled convolution
            targets.add_linear(path, names, part)
        elif isinstance(part, Experts) and not part.first:  # experts of media have no adapters
            targets.add_experts(path, names, part, clamped=_is_clamped(model, path))
    return targets


def _is_clamped(model: Model, path: str) -> bool:
    """Whether the experts at a path have gpt-oss' activation."""
    owner: Any = model
    for step in path.split(".")[:-1]:
        owner = owner[int(step)] if step.isdigit() else getattr(owner, step)
    return owner.activation is Activation.CLAMPED_SWIGLU
