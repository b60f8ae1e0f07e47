"""Sites: gives the layers of a model that adapters may change their places, before the weights are read.

Thread: device, at start. In: a model with empty parts. Out: the same model, whose layers make weights with places; and
the sites by the layer's path in the model's tree (`layers.3.attention.qkv`), by which adapters name their matrices.
"""

from __future__ import annotations

from engine.base.config import LoraConfig
from engine.base.errors import ConfigError
from engine.layers.linear import GatedLinear, Linear
from engine.layers.placed import PlacedSite, PlaceRows
from engine.models.base.decoder import Decoder
from engine.models.base.model import Model
from engine.weights.table import addressed

KINDS = (Linear, GatedLinear)


def give_sites(model: Model, config: LoraConfig) -> dict[str, PlacedSite]:
    """Gives each layer that adapters may change a site. Raises ConfigError if the model cannot have adapters by
    name."""
    name = model.config.architecture
    if not isinstance(model, Decoder) or model.config.implementation != "native":
        raise ConfigError(f"--enable-lora: {name} has no decoder of ours, which adapters need; leave the flag out")
    if model.adapters:
        raise ConfigError(f"--enable-lora: {name} has adapters of its own ({', '.join(model.adapters)})")
    rows, sites = PlaceRows(), dict[str, PlacedSite]()
    for path, names, part in addressed(model.weight_table(), model):
        if path.startswith("layers.") and type(part) in KINDS and is_target(names, config.targets):
            assert isinstance(part, Linear)
            part.site = sites[path] = PlacedSite(part, rows, config.max_loras)
    model.chosen = rows
    return sites


def is_target(names: list[str], targets: tuple[str, ...]) -> bool:
    """Whether one of a layer's modules is among the operator's targets (last components of names); (): all are."""
    return not targets or any(name.rpartition(".")[2] in targets for name in names)
