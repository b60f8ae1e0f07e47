"""SparseMLP: a router, experts, a few of which each token uses, and optionally a shared MLP; replaces GatedMLP.

    chosen, weights = route(n)          n: the residual stream [T, hidden] through the norm before the MLP
    x += sum over k of weights[k] * expert[chosen[k]](n) (+ shared(n), or shared(n) * sigmoid(n . gate))
         or sum over k of expert[chosen[k]](weights[k] * n), if the routing weighs the input
         or latent_out(sum of expert[chosen[k]](latent_in(n))) (+ shared(n)), if experts have a latent width

An expert without a gate is down(activate(up(n))).

Thread: device. In: n. Out: an Addend, whose sum is computed when the stream adds it (engine/layers/stream.py).
The router's logits, its correction and the scores are float32 for every checkpoint dtype. Of an engine's ranks each may
have some of the experts: all ranks route alike, and the sum over k is a rank's partial sum over its own experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from engine.base.model_config import ExpertsConfig, TextConfig
from engine.kernels.activation import BY_NAME, Activation
from engine.kernels.gemm.codes import Codes
from engine.kernels.gemm.pack import Placement
from engine.kernels.gemm.weight import Weight
from engine.kernels.moe.capture import Capture
from engine.kernels.moe.pack import pack_experts, pack_router
from engine.kernels.moe.route import route
from engine.kernels.moe.route_rows import route_of_normed
from engine.kernels.moe.weight import ExpertsWeight
from engine.layers.adapted_experts import AdaptedExperts, ExpertsDelta
from engine.layers.linear import Linear
from engine.layers.mixture import Latent, Mixture
from engine.layers.mlp import GatedMLP, mlp_of_width
from engine.layers.norm import Normed, RMSNorm
from engine.quant.base import UNQUANTISED, Quantised, Scheme, Stored
from engine.quant.blocks import GROUP, block_matrices
from engine.quant.stacked import Stacked, made_codes
from engine.quant.stored import checked_group
from engine.weights.table import Wanted


class Router:
    """The router's matrix [E, hidden], in floats, also if the files have codes."""

    __slots__ = ("biased", "hidden_size", "num_experts", "scheme", "weight")

    in_floats: ClassVar[bool] = True
    scheme: Scheme
    weight: Weight

    def __init__(self, hidden_size: int, num_experts: int, biased: bool) -> None:
        self.hidden_size = hidden_size
        self.num_experts = num_experts
        self.biased = biased
        self.scheme = UNQUANTISED

    @property
    def in_features(self) -> int:
        return self.hidden_size

    def expects(self) -> dict[str, tuple[Wanted | None, ...]]:
        weight = self.scheme.expects((self.num_experts,), (self.hidden_size,))
        return {**weight, "bias": (Wanted((self.num_experts,)),)} if self.biased else weight

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        bias = pieces["bias"][0] if self.biased else None
        if isinstance(self.scheme, Quantised):
            given = {kind: piece for kind, piece in pieces.items() if kind != "bias" or not self.biased}
            (found,) = self.scheme.matrices(given, placement)
            weight = found.dense().float() if isinstance(found, Codes) else found
        else:
            weight = _whole(pieces, "weight")
        self.weight = pack_router(weight, bias, placement)


class RouterNorm(RMSNorm):
    """x / rms(x) * scale / sqrt(size): the norm before Gemma 4's router."""

    __slots__ = ()

    def expects(self) -> dict[str, tuple[Wanted | None, ...]]:
        return {"scale": (Wanted((self.size,)),)}

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        super().fill({"weight": pieces["scale"]}, placement)
        self.weight *= self.size**-0.5


class PerExpert:
    """A learned number per expert."""

    __slots__ = ("kind", "shape", "weight")

    weight: Tensor  # [E] float32

    def __init__(self, kind: str, *shape: int) -> None:
        self.kind = kind  # the tensor's name within its module in the checkpoint
        self.shape = shape

    def expects(self) -> dict[str, tuple[Wanted | None, ...]]:
        return {self.kind: (Wanted(self.shape),)}

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        (piece,) = pieces[self.kind]
        assert piece is not None
        self.weight = piece.to(placement.device, torch.float32, copy=True).flatten()


class Experts:
    """The gate_up matrices or the down matrices of all experts."""

    __slots__ = (
        "first", "in_features", "is_down", "is_whole", "layout", "making", "num_experts", "pieces", "scheme", "site",
        "stacked", "weight",
    )  # fmt: skip

    scheme: Scheme  # only for the layout "apart"
    stacked: Stacked | None  # set if files hold codes of all experts in one tensor
    making: Stored | None  # set if floats of all experts in one tensor are quantised at load
    site: ExpertsDelta | None  # the places of adapters
    weight: ExpertsWeight

    def __init__(self, config: ExpertsConfig, in_features: int, *pieces: int, is_down: bool = False) -> None:
        self.num_experts = config.held or config.routing.num_experts  # of this rank
        self.first = config.first + config.routing.first  # the number of the first expert in the checkpoint
        self.is_whole = False  # whether ranks have whole experts; else each has a part of every expert's width
        self.layout = config.layout
        self.in_features = in_features
        self.pieces = pieces  # rows of gate and of up, of up, or of down
        self.is_down = is_down
        self.stacked = self.making = self.site = None
        if config.layout == "apart":
            self.scheme = UNQUANTISED

    def expects(self) -> dict[str, tuple[Wanted | None, ...]]:
        """Gate and up of the first expert, then of the second; or one tensor of all experts."""
        count, rows, columns, kind = self.num_experts, sum(self.pieces), self.in_features, self._kind
        if self.layout == "apart":
            return self.scheme.expects(self.pieces * count, (columns,))
        if self.layout == "joined":
            return {"weight": (self._floats(count, rows, columns),)}
        if self.layout in ("upright", "turned"):
            return self._in_one(rows, columns)
        if self.layout == "one below the other":
            sizes = (count * rows // 2, columns) if len(self.pieces) > 1 else (count * columns, rows)
            return {name: (self._floats(*sizes),) for name in self._below}
        bias = {f"{kind}_bias": (Wanted((count, rows)),)}
        if self.layout == "by turns":
            return {**self._in_one(rows, columns), **bias}
        groups = columns // checked_group(columns, GROUP)
        blocks = Wanted((count, rows, groups, GROUP // 2), (torch.uint8,))
        return {f"{kind}_blocks": (blocks,), f"{kind}_scales": (Wanted((count, rows, groups), (torch.uint8,)),), **bias}

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        matrices: Sequence[Codes | Tensor]
        biases, kind = None, self._kind
        if self.stacked is not None:
            matrices = self._codes(self.stacked.matrices(pieces, placement))
        elif self.layout == "joined":
            matrices = list(_whole(pieces, "weight"))
        elif self.layout == "upright":
            matrices = list(_whole(pieces, kind))
        elif self.layout == "turned":
            matrices = [matrix.T for matrix in _whole(pieces, kind)]
        elif self.layout == "one below the other":
            each = zip(*(_whole(pieces, name).unflatten(0, (self.num_experts, -1)) for name in self._below))
            matrices = [matrix if len(self.pieces) > 1 else matrix.T for expert in each for matrix in expert]
        elif self.layout == "by turns":
            matrices = self._turns(_whole(pieces, kind).transpose(1, 2))
        elif self.layout == "codes by turns":
            blocks, scales = (_whole(pieces, f"{kind}_{name}").to(placement.device) for name in ("blocks", "scales"))
            matrices = block_matrices(self._turns(blocks), self._turns(scales), placement.device)
        elif isinstance(self.scheme, Quantised):
            matrices = self.scheme.matrices(pieces, placement)
        else:
            matrices = [piece for piece in pieces["weight"] if piece is not None]
        if f"{kind}_bias" in pieces:
            found, turns = _whole(pieces, f"{kind}_bias").float(), len(self.pieces)
            biases = torch.cat([found[:, turn::turns] for turn in range(turns)], 1)
        if self.making is not None:
            matrices = made_codes(self.making, matrices, placement.device)
        self.weight = pack_experts(matrices, biases, self.num_experts, placement, gated=len(self.pieces) > 1)
        if self.site is not None:
            self.weight = AdaptedExperts(self.weight, self.site)

    @property
    def is_gated(self) -> bool:
        """Whether the product makes gate and up."""
        return len(self.pieces) > 1

    @property
    def stacked_codes(self) -> int:
        """The number of matrices that are codes in one tensor of all experts."""
        return self.num_experts * len(self.pieces) if self.layout == "codes by turns" or self.stacked_as else 0

    @property
    def stacked_as(self) -> Stored | None:
        """The storage of these codes; None: the layout defines it."""
        return self.making if self.stacked is None else self.stacked.stored

    @property
    def product(self) -> str:
        """The prefix of the tensors of all experts, in layouts that may have stacked codes; else ""."""
        return self._kind if self.layout in ("upright", "turned", "by turns") else ""

    @property
    def is_turned(self) -> bool:
        """Whether the files have each matrix transposed."""
        return self.layout != "upright"

    @property
    def _kind(self) -> str:
        """The prefix of the tensors of all experts, in layouts with bare tensors."""
        if self.is_down:
            return "down_proj"
        return "gate_up_proj" if len(self.pieces) > 1 else "up_proj"

    @property
    def _below(self) -> tuple[str, ...]:
        """Names of the matrices in which experts are stacked along the rows."""
        return ("w1", "v1") if len(self.pieces) > 1 else ("w2",)

    def _in_one(self, rows: int, columns: int) -> dict[str, tuple[Wanted | None, ...]]:
        """The expectation of one tensor with all experts' matrices, or of their stacked codes."""
        if self.stacked is not None:
            return self.stacked.expects(rows, columns)
        sizes = (columns, rows) if self.is_turned else (rows, columns)
        return {self._kind: (self._floats(self.num_experts, *sizes),)}

    def _floats(self, *shape: int) -> Wanted:
        """The expectation of a float tensor, which may be quantised at load."""
        wanted = Wanted(shape)
        return wanted if self.making is None else wanted._replace(in_memory=self.making.wants(1, 1)["weight"].in_memory)

    def _codes(self, matrices: Sequence[Codes]) -> Sequence[Codes]:
        """The matrices with gate's rows before up's rows."""
        turns = len(self.pieces)
        if self.layout != "by turns" or turns == 1:
            return matrices
        index = torch.cat([torch.arange(turn, sum(self.pieces), turns) for turn in range(turns)])
        return [matrix.rows(index.to(matrix.values.device)) for matrix in matrices]

    def _turns(self, upright: Tensor) -> list[Tensor]:
        """[E, rows, ...] with interleaved pieces -> the rows of each piece of each expert."""
        turns = len(self.pieces)
        return [expert[turn::turns] for expert in upright for turn in range(turns)]


def _whole(pieces: dict[str, list[Tensor | None]], kind: str) -> Tensor:
    """The single tensor of a kind."""
    (found,) = pieces[kind]
    assert found is not None
    return found


class SparseMLP:
    """A sparse MLP; replaces GatedMLP."""

    __slots__ = (
        "activation", "correction", "down", "expert_scale", "gate_up", "lasting", "latent_in", "latent_out",
        "newest", "number", "router", "router_norm", "routing", "shared", "shared_gate",
    )  # fmt: skip

    def __init__(self, text: TextConfig, config: ExpertsConfig) -> None:
        hidden, routing = text.hidden_size, config.routing
        self.activation = Activation.CLAMPED_SWIGLU if config.clamped else BY_NAME[text.activation]
        self.routing = routing
        self.number = 0  # index among the model's layers with experts
        # For engine/step/parts/expert_load: the experts that the newest step's rows chose; `lasting`: a buffer on an
        # accelerator, int32 [tokens * top_k]; `newest`: on a CPU, [rows, top_k].
        self.lasting: Tensor | None = None
        self.newest: Tensor | None = None
        self.router = Router(hidden, routing.num_experts, config.router_bias)
        self.router_norm = RouterNorm(hidden, text.norm_eps) if config.router_norm else None
        self.correction = self.expert_scale = None
        if routing.correction:
            line = (1,) if config.correction_line else ()
            self.correction = PerExpert("e_score_correction_bias", *line, routing.num_experts)
        if routing.expert_scale:
            self.expert_scale = PerExpert("per_expert_scale", routing.num_experts)
        inner = config.latent_size or hidden
        self.gate_up = Experts(config, inner, *((config.width,) * (2 if text.gated_mlp else 1)))  # else up alone
        self.down = Experts(config, config.width, inner, is_down=True)
        self.latent_in = self.latent_out = None
        if config.latent_size:
            self.latent_in = Linear(hidden, inner, bias=text.mlp_bias)
            self.latent_out = Linear(inner, hidden, bias=text.mlp_bias)
            self.latent_out.of_summands = True
        self.shared = mlp_of_width(text, config.shared_width) if config.shared_width else None
        self.shared_gate = Linear(hidden, 1) if config.shared_gate else None

    def __call__(
        self, x: Normed, count: Tensor | None = None, capture: Capture | None = None, others: Tensor | None = None
    ) -> Mixture | Latent:
        """count: int32 [1] on the device; rows from here on are padding, choose no expert and read no weight.

        capture: the buffer for the rows' experts of all layers.
        others: bool [T, 1]; these rows choose no expert and read no weight, and their results are arbitrary.
        """
        correction = None if self.correction is None else self.correction.weight
        scales = None if self.expert_scale is None else self.expert_scale.weight
        norm, capture = x.norm, capture and capture.layer(self.number, others)
        rest = self.router.weight, correction, self.routing, count, capture, scales, self.lasting
        inputs, codes, gate = None if self.latent_in is not None else self.gate_up.weight.inputs, None, None
        if self.router_norm is None and isinstance(norm, RMSNorm):  # rows [T, hidden]
            by_gate = None if self.shared_gate is None else self.shared_gate.weight
            rows, chosen, given, codes, gate = route_of_normed(
                x.residual, norm.weight, norm.eps, *rest, inputs, by_gate
            )
        else:
            rows = x.rows()
            chosen, given = route(rows if self.router_norm is None else self.router_norm(x.residual), *rest)
        if others is not None:
            chosen.masked_fill_(others, self.routing.num_experts)
        if not rows.is_cuda:
            self.newest = chosen
        pairs, own, held = self.gate_up.weight.pairs(chosen), None, self.gate_up.num_experts
        if held < self.routing.num_experts:  # other ranks have the rest
            pairs, own = replace(pairs, share=held / self.routing.num_experts), chosen
        before, weights = (given, None) if self.routing.weigh_input else (None, given)
        inner, first, second = rows, self.gate_up.weight, self.down.weight
        if self.latent_in is not None:
            inner = self.latent_in(rows)
        terms = shared = None
        if isinstance(first, AdaptedExperts) and first.site.acts:
            assert isinstance(second, AdaptedExperts), "both products of a layer have places, or none"
            made, terms = first.apart(second, inner, pairs, self.activation, before, self.gate_up.is_gated)
        elif self.gate_up.is_gated:
            matrices = self._shared_matrices
            both = matrices and first.of_mlp_and_shared(second, matrices, inner, codes, pairs, self.activation)
            made, shared = both or (first.of_mlp(second, inner, codes, pairs, self.activation, before), None)
        else:
            made = first.of_ungated(second, inner, pairs, self.activation)
        if shared is None and self.shared is not None:
            shared = self.shared.of_rows(rows)
        if self.latent_out is not None:
            mixture = Mixture(made, weights, None, None, count, own, held, terms)
            return Latent(self.latent_out, mixture.value(), shared)
        if self.shared_gate is not None and gate is None:
            gate = self.shared_gate(rows)
        return Mixture(made, weights, shared, gate, count, own, held, terms)

    @property
    def _shared_matrices(self) -> tuple[Weight, Weight] | None:
        """Of the shared MLP, if it computes from its input what each expert computes, and no row has an adapter."""
        shared = self.shared
        if not isinstance(shared, GatedMLP) or self.latent_in is not None or self.routing.weigh_input:
            return None
        first, second = shared.gate_up.weight.plain, shared.down.weight.plain
        same = shared.gate_up.activation is self.activation
        return (first, second) if same and first is not None and second is not None else None
