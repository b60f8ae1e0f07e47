"""Rotations: some quantisers multiply weights by orthogonal matrices, and some rotations also apply to activations.

In: the settings in config.json. Out: ConfigError if activations must be rotated at run time. Rotations that are only
part of the codes are served. Without this check, a model with unrotated inputs would answer nonsense.
"""

from __future__ import annotations

from engine.base.errors import ConfigError
from engine.checkpoint.section import Section

IN_WEIGHTS = ("weight_input", "weight_output")  # locations whose rotation is part of the codes
# Keys of AutoRound, newest name first (https://github.com/intel/auto-round/pull/1797), and of GPTQModel
# (https://github.com/ModelCloud/GPTQModel/pull/2980), which rotates the inputs of down_proj.
KEYS = ("rotation_config", "spinquant_config", "hadamard_config", "transform_config", "rotation")
RUNNING = ("r3", "r4", "online_r1_rotation")  # AutoRound's SpinQuant rotations at run time; r1 and r2 are in the codes


def refuse_rotations(settings: Section) -> None:
    """ConfigError if AutoRound or GPTQModel requires rotated activations."""
    for key in KEYS:
        found = settings.values.get(key)
        in_codes = isinstance(found, dict) and "r1" in found and not any(found.get(name) for name in RUNNING)
        if found and not in_codes:
            raise ConfigError(
                f"{settings.path}: {key}: inputs of the matrices are rotated while the model runs, which is not "
                "computed: quantise the checkpoint again without rotations"
            )


def refuse_transforms(settings: Section) -> None:
    """ConfigError if inputs, outputs, queries or keys must be rotated at run time (QuIP, SpinQuant)."""
    if not settings.values.get("transform_config"):
        return
    found = settings.section("transform_config")
    groups = found.section("config_groups").values if found.values.get("config_groups") else {}
    for name, group in groups.items():
        places = group.get("apply") if isinstance(group, dict) else None
        if not isinstance(places, list) or not all(isinstance(place, dict) for place in places):
            raise ConfigError(f"{found.path}: config_groups.{name} must be an object whose apply is a list of objects")
        if running := [place.get("location") for place in places if place.get("location") not in IN_WEIGHTS]:
            raise ConfigError(
                f"{found.path}: config_groups.{name} rotates {', '.join(map(str, running))} while the model runs, "
                "which is not computed; rotations of weights are part of codes: quantise the checkpoint with them"
            )
