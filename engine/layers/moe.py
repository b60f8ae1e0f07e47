"""SparseMLP: a router, experts of which each token has a few, and perhaps a shared MLP; stands where GatedMLP stands.

    chosen, weights = route(n)          n: the residual stream [T, hidden] through the norm before the MLP
    x += sum over k of weights[k] * expert[chosen[k]](n) (+ shared(n), or shared(n) * sigmoid(n . gate))

Thread: device. In: n. Out: what the layer adds to the stream, summed when it is added (engine/layers/stream.py). The
router's logits, its correction and the scores are float32 whatever the checkpoint's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.activation import BY_NAME, Activation
from engine.kernels.gemm.pack import Placement
from engine.kernels.gemm.weight import Weight
from engine.kernels.moe.combine import combine, combine_then_norm
from engine.kernels.moe.pack import pack_experts, pack_router
from engine.kernels.moe.route import route
from engine.kernels.moe.weight import ExpertsWeight
from engine.layers.linear import Linear
from engine.layers.mlp import GatedMLP
from engine.layers.norm import Normed, RMSNorm
from engine.model_config import ExpertsConfig, TextConfig
from engine.weights.table import Wanted


class Router:
    """The router's matrix [E, hidden]."""

    __slots__ = ("biased", "hidden_size", "num_experts", "weight")

    weight: Weight

    def __init__(self, hidden_size: int, num_experts: int, biased: bool) -> None:
        self.hidden_size = hidden_size
        self.num_experts = num_experts
        self.biased = biased

    def expects(self) -> dict[str, tuple[Wanted | None, ...]]:
        weight = {"weight": (Wanted((self.num_experts, self.hidden_size)),)}
        return {**weight, "bias": (Wanted((self.num_experts,)),)} if self.biased else {**weight}

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        (weight,) = pieces["weight"]
        assert weight is not None
        self.weight = pack_router(weight, pieces["bias"][0] if self.biased else None, placement)


class Correction:
    """A number per expert, added to the scores for the choice of experts alone."""

    __slots__ = ("shape", "weight")

    weight: Tensor  # [E] float32

    def __init__(self, config: ExpertsConfig) -> None:
        count = config.routing.num_experts
        self.shape = (1, count) if config.correction_line else (count,)

    def expects(self) -> dict[str, tuple[Wanted | None, ...]]:
        return {"e_score_correction_bias": (Wanted(self.shape),)}

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        (piece,) = pieces["e_score_correction_bias"]
        assert piece is not None
        self.weight = piece.to(placement.device, torch.float32, copy=True).flatten()


class Experts:
    """One product of every expert: a matrix, or gate and up, of each."""

    __slots__ = ("in_features", "layout", "num_experts", "pieces", "weight")

    weight: ExpertsWeight

    def __init__(self, config: ExpertsConfig, in_features: int, *pieces: int) -> None:
        self.num_experts = config.routing.num_experts
        self.layout = config.layout
        self.in_features = in_features
        self.pieces = pieces  # rows of gate and of up, or of down

    @property
    def kind(self) -> str:
        """The tensor of all experts of a layout that is no module's."""
        return "gate_up_proj" if len(self.pieces) > 1 else "down_proj"

    def expects(self) -> dict[str, tuple[Wanted | None, ...]]:
        """Of the first expert gate and up, then of the second; or one tensor of all."""
        count, rows, columns = self.num_experts, sum(self.pieces), self.in_features
        if self.layout == "apart":
            return {"weight": tuple(Wanted((rows, columns)) for rows in self.pieces) * count}
        if self.layout == "joined":
            return {"weight": (Wanted((count, rows, columns)),)}
        wanted: dict[str, tuple[Wanted | None, ...]] = {self.kind: (Wanted((count, columns, rows)),)}
        return {**wanted, f"{self.kind}_bias": (Wanted((count, rows)),)} if self.layout == "by turns" else wanted

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        kind = "weight" if "weight" in pieces else self.kind
        matrices, biases = [piece for piece in pieces[kind] if piece is not None], None
        if self.layout != "apart":
            matrices = list(matrices[0])  # of each expert
        if self.layout == "turned":
            matrices = [matrix.T for matrix in matrices]
        if self.layout == "by turns":
            turns = len(self.pieces)
            matrices = [matrix[:, turn::turns].T for matrix in matrices for turn in range(turns)]
            (found,) = pieces[f"{kind}_bias"]
            assert found is not None
            biases = torch.cat([found[:, turn::turns] for turn in range(turns)], 1).float()
        self.weight = pack_experts(matrices, biases, self.num_experts, placement, gated=len(self.pieces) > 1)


class SparseMLP:
    """Called as GatedMLP is."""

    __slots__ = ("activation", "correction", "down", "gate_up", "router", "routing", "shared", "shared_gate")

    def __init__(self, text: TextConfig, config: ExpertsConfig) -> None:
        hidden, routing = text.hidden_size, config.routing
        self.activation = Activation.CLAMPED_SWIGLU if config.clamped else BY_NAME[text.activation]
        self.routing = routing
        self.router = Router(hidden, routing.num_experts, config.router_bias)
        self.correction = Correction(config) if routing.correction else None
        self.gate_up = Experts(config, hidden, config.width, config.width)
        self.down = Experts(config, config.width, hidden)
        self.shared = None
        if config.shared_width:
            self.shared = GatedMLP(hidden, config.shared_width, text.mlp_bias, self.activation)
        self.shared_gate = Linear(hidden, 1) if config.shared_gate else None

    def __call__(self, x: Normed) -> Mixture:
        rows = x.rows()  # [T, hidden]
        correction = None if self.correction is None else self.correction.weight
        chosen, weights = route(rows, self.router.weight, correction, self.routing)
        pairs = self.gate_up.weight.pairs(chosen)
        made = self.down.weight.of_pairs(self.gate_up.weight.of_tokens(rows, pairs, self.activation), pairs)
        shared = None if self.shared is None else self.shared.of_rows(rows)
        gate = None if self.shared_gate is None else self.shared_gate(rows)
        return Mixture(made, weights, shared, gate)


@dataclass(slots=True, eq=False)
class Mixture:
    """What a token's experts made, not summed yet: an Addend."""

    made: Tensor  # [T, top_k, hidden]
    weights: Tensor  # [T, top_k] float32
    shared: Tensor | None  # [T, hidden]
    gate: Tensor | None  # [T, 1]

    def value(self) -> Tensor:
        return combine(self.made, self.weights, self.shared, self.gate, None)

    def add_to(self, residual: Tensor) -> None:
        combine(self.made, self.weights, self.shared, self.gate, residual)

    def add_then(self, residual: Tensor, norm: RMSNorm) -> Normed:
        summed = self.made, self.weights, self.shared, self.gate
        return Normed(norm, residual, combine_then_norm(*summed, residual, norm.weight, norm.eps))
