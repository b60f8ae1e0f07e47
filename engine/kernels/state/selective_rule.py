"""Runs Mamba-1's convolution and state space of a step on the device that holds the pages."""

from __future__ import annotations

from torch import Tensor

from engine.attention.state_meta import StateMeta
from engine.kernels.state.conv import launch_conv
from engine.kernels.state.delta import StatePages
from engine.kernels.state.host import selective_conv_on_host, selective_scan_on_host
from engine.kernels.state.selective import SelectiveInputs, SelectiveShape, SelectiveWeights
from engine.kernels.state.selective_kernel import launch_selective


def selective_conv(
    projected: Tensor, weights: SelectiveWeights, shape: SelectiveShape, cache: StatePages, meta: StateMeta
) -> Tensor:
    """projected [T, x | z] -> silu(conv(x)) [T, inner], new."""
    if not projected.is_cuda:
        return selective_conv_on_host(projected, weights, shape, cache, meta)
    return launch_conv(projected, weights.taps, weights.bias, cache, meta, shape.ring, (0, shape.inner))


def selective_scan(
    given: SelectiveInputs,
    projected: Tensor,
    weights: SelectiveWeights,
    shape: SelectiveShape,
    cache: StatePages,
    meta: StateMeta,
) -> Tensor:
    """Computes the rule -> [T, inner], new; writes the tails and runs of `meta`."""
    if not given.x.is_cuda:
        return selective_scan_on_host(given, weights, shape, cache, meta)
    return launch_selective(given, projected[:, : shape.inner], weights, shape, cache, meta)
