"""Builds layers with a state from configurations, and sets the form of their states from the operator's settings.

Thread: device, before weights are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from engine.base.config import StateConfig
from engine.base.errors import ConfigError
from engine.base.mixers import DeltaConfig, Mamba1Config, Mamba2Config
from engine.kernels.state.delta import DeltaShape
from engine.kernels.state.selective import SelectiveShape
from engine.kernels.state.ssd import SsdShape
from engine.layers.delta import GatedDelta
from engine.layers.mamba import Mamba1, Mamba2
from engine.layers.state import FOLD, StateMixer, state_form

Recurrent = GatedDelta | Mamba1 | Mamba2


def recurrent(
    width: int, config: DeltaConfig | Mamba1Config | Mamba2Config, dtype: torch.dtype, device: str
) -> Recurrent:
    """Builds the layer of a configuration; width: of the residual stream."""
    form = state_form(device)
    if isinstance(config, DeltaConfig):
        heads = config.key_heads, config.value_heads, config.key_dim, config.value_dim
        shape = DeltaShape(*heads, config.taps, form.ring, config.eps, sigmoid=config.gate == "sigmoid")
        return GatedDelta(width, shape, form, dtype, config.by_key_head)
    if isinstance(config, Mamba1Config):
        norms, plain = config.norms == "weights", config.eps if config.norms == "bare" else None
        inner = SelectiveShape(config.width, config.state_size, config.taps, form.ring)
        given = width, inner, config.rank, form, dtype, config.bias, config.conv_bias
        return Mamba1(*given, norms=norms, plain=plain, eps=config.eps)
    sizes = config.heads, config.head_dim, config.groups, config.state_size, config.taps, form.ring
    return Mamba2(width, SsdShape(*sizes, config.norm, config.eps), form, dtype, config.bias, config.conv_bias)


def set_states(model: Any, config: StateConfig, on_host: bool, drafts: int = 0, exact: bool = False) -> None:
    """Sets the form of a model's states; `drafts`: most drafts of a row in a step; `exact`: no bit of a
    row's results may depend on how its positions are cut into steps.

    ConfigError: the settings configure states, but the model has none. Type "auto": the dtype that the checkpoint
    specifies, nearly always float32.
    """
    layers = getattr(model, "layers", ())
    found = (mixer for layer in layers for mixer in getattr(layer, "mixers", ()))
    mixers = [mixer for mixer in found if isinstance(mixer, StateMixer)]
    if not mixers:
        for value, usual, flag in ((config.mode, "align", "cache-mode"), (config.dtype, "auto", "ssm-cache-dtype")):
            if value != usual:
                raise ConfigError(f"--mamba-{flag} {value}: no layer of this model has a state; leave the flag out")
        return
    dtype = config.dtype if config.dtype != "auto" else _stated(model.config.raw)
    chunk = max(mixer.exact_chunk for mixer in mixers) if exact else FOLD
    form = state_form("cpu" if on_host else "cuda", drafts, getattr(torch, dtype), chunk, exact)
    for mixer in mixers:
        mixer.set_form(form)


def _stated(raw: Mapping[str, Any]) -> str:
    """The dtype of states in config.json, already checked; float32 if config.json specifies none."""
    bodies = [body for body in (raw.get("text_config"), raw) if isinstance(body, dict)]
    named = (body.get(key) for body in bodies for key in ("mamba_ssm_cache_dtype", "mamba_ssm_dtype"))
    return str(next((name for name in named if name), "float32")).removeprefix("torch.")
