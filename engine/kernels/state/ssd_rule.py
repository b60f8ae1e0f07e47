"""Runs Mamba-2's state space of a step on the device that holds the pages: two launches if every row is short."""

from __future__ import annotations

from torch import Tensor

from engine.attention.state_meta import StateMeta
from engine.kernels.state.conv import launch_conv
from engine.kernels.state.delta import StatePages
from engine.kernels.state.host import ssd_on_host
from engine.kernels.state.ssd import SsdShape, SsdWeights
from engine.kernels.state.ssd_replay import launch_ssd_replay
from engine.kernels.state.ssd_scan import launch_ssd_scan
from engine.kernels.state.ssd_step import launch_ssd_step


def ssd(projected: Tensor, weights: SsdWeights, shape: SsdShape, cache: StatePages, meta: StateMeta) -> Tensor:
    """projected [T, z | x | B | C | dt] -> [T, inner], new; tails and runs of `meta` are written.

    T may exceed the tokens of `meta`: further tokens belong to no row, and their results are not written.
    """
    rule = launch_ssd if projected.is_cuda else ssd_on_host
    return rule(projected, weights, shape, cache, meta)


def launch_ssd(projected: Tensor, weights: SsdWeights, shape: SsdShape, cache: StatePages, meta: StateMeta) -> Tensor:
    """Launches the Triton kernels; arguments as `ssd`."""
    out = projected.new_empty(len(projected), shape.inner)
    if shape.exact:
        launch_ssd_replay(projected, weights, shape, cache, meta, out)
        return out
    inputs, again = projected[:, shape.inner :], (0, shape.again_width)
    active = launch_conv(inputs, weights.taps, weights.bias, cache, meta, shape.ring, again)
    launch_ssd_step(active, projected, weights, shape, cache, meta, out)
    if not meta.decode_only:
        launch_ssd_scan(active, projected, weights, shape, cache, meta, out)
    return out
