"""Runs the gated delta rule of a step on the device that holds the pages: two launches if every row is short."""

from __future__ import annotations

from torch import Tensor

from engine.attention.state_meta import StateMeta
from engine.kernels.state.conv import launch_conv
from engine.kernels.state.delta import UNIT, DeltaShape, DeltaWeights, StatePages
from engine.kernels.state.delta_channels import launch_channel_step
from engine.kernels.state.delta_replay import launch_delta_replay
from engine.kernels.state.delta_scan import launch_delta_scan
from engine.kernels.state.delta_step import launch_delta_step
from engine.kernels.state.host import delta_rule_on_host


def delta_rule(
    projected: Tensor, weights: DeltaWeights, shape: DeltaShape, cache: StatePages, meta: StateMeta
) -> Tensor:
    """projected [T, q | k | v | z | b | a] -> [T, value_width], new; tails and runs of `meta` are written.

    T may exceed the tokens of `meta`: further tokens belong to no row, and their results are not written.
    """
    rule = launch_delta_rule if projected.is_cuda else delta_rule_on_host
    return rule(projected, weights, shape, cache, meta)


def launch_delta_rule(
    projected: Tensor, weights: DeltaWeights, shape: DeltaShape, cache: StatePages, meta: StateMeta
) -> Tensor:
    """Launches the Triton kernels; arguments as `delta_rule`."""
    out = projected.new_empty(len(projected), shape.value_width)
    if shape.exact:
        launch_delta_replay(projected, weights, shape, cache, meta, out)
        return out
    if shape.per_channel:
        assert meta.decode_only, "rows with a gate per channel of keys are not scanned in chunks"
        active = convolved_heads(projected, weights, shape, cache, meta, short=True)
        launch_channel_step(active, projected, weights, shape, cache, meta, out)
        return out
    launch_delta_step(projected, weights, shape, cache, meta, out)
    if not meta.decode_only:
        active = convolved_heads(projected, weights, shape, cache, meta, short=False)
        launch_delta_scan(active, projected, weights, shape, cache, meta, out)
    return out


def convolved_heads(
    projected: Tensor, weights: DeltaWeights, shape: DeltaShape, cache: StatePages, meta: StateMeta, short: bool
) -> Tensor:
    """Returns q | k | v after convolution and norms [T, conv_width]; without `short`, for long rows only."""
    return launch_conv(
        projected, weights.taps, None, cache, meta, shape.ring, (shape.key_width, 2 * shape.key_width),
        shape.key_heads, shape.key_dim, shape.value_dim, UNIT, short,
    )  # fmt: skip
