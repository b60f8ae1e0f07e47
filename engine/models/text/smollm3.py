"""SmolLM3: Llama without rotation in every fourth layer."""

from __future__ import annotations

from dataclasses import replace

from engine.base.errors import ConfigError
from engine.base.model_config import TextConfig
from engine.checkpoint.rope import FULL, SLIDING, RopeDefaults, no_rope
from engine.checkpoint.section import MAX_LAYERS, Section
from engine.checkpoint.text import read_text
from engine.models.base.family import Family
from engine.models.text.llama import Llama


def text(body: Section, outer: Section) -> TextConfig:
    """The decoder's config; in no_rope_layers 1 means rotation, 0 means no rotation."""
    count, period = body.integer("num_hidden_layers", least=1, most=MAX_LAYERS), body.size("no_rope_layer_interval", 4)
    rotated = body.items("no_rope_layers", [int((number + 1) % period != 0) for number in range(count)])
    if len(rotated) != count:
        raise ConfigError(f"{body.path}: no_rope_layers has {len(rotated)} entries for {count} layers")
    if not body.values.get("layer_types"):  # layers without rotation have the window
        body = Section({**body.values, "layer_types": [FULL if turns else SLIDING for turns in rotated]}, body.path)
    windows = body.boolean("use_sliding_window", False) and body.values.get("sliding_window") is not None
    rope = RopeDefaults(2_000_000.0)
    read = read_text(body, outer, sliding="layers" if windows else "none", rope=rope, tied=True)
    none = no_rope(read.head_dim)
    layers = zip(read.layers, rotated)
    return replace(read, layers=tuple(layer if turns else replace(layer, rope=none) for layer, turns in layers))


FAMILY = Family(name="SmolLM3", architectures=("SmolLM3ForCausalLM",), model=Llama, text=text)
