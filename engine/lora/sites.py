"""Sites: gives the layers of a model that adapters may change their places, before the weights are read.

Thread: device, at start. In: a model with empty parts. Out: the same model, whose layers make weights with places; and
the sites by the layer's path in the model's tree (`layers.3.attention.qkv`), by which adapters name their matrices.
"""

from __future__ import annotations

from engine.base.config import LoraConfig
from engine.base.errors import ConfigError
from engine.layers.embed import Head
from engine.layers.linear import GatedLinear, Linear
from engine.layers.placed import PlacedSite, PlaceRows
from engine.layers.placed_device import DeviceRows, DeviceSite
from engine.models.base.decoder import Decoder
from engine.models.base.model import Model
from engine.weights.table import addressed

KINDS = (Linear, GatedLinear, Head)
HEAD = "head"  # the path of the logits' matrix


HostSites = dict[str, PlacedSite]
DeviceSites = dict[str, DeviceSite]


def give_host_sites(model: Model, config: LoraConfig) -> HostSites:
    """Gives each layer of a model on a CPU that adapters may change a site. Raises ConfigError if the model cannot have
    adapters by name."""
    rows = PlaceRows()
    sites = {path: PlacedSite(layer, rows, config.max_loras) for path, layer in changed(model, config)}
    for site in sites.values():
        site.linear.site = site
    decoder = _decoder(model)
    decoder.chosen = rows
    if HEAD in sites:
        decoder.head_chosen = sites[HEAD].rows = PlaceRows()
    return sites


def give_device_sites(model: Model, config: LoraConfig, invariant: bool) -> DeviceSites:
    """The same for a model on an accelerator; `invariant`: --deterministic."""
    rows = DeviceRows(config.max_loras, invariant)
    sites = {}
    for number, (path, layer) in enumerate(changed(model, config)):
        layer.site = sites[path] = DeviceSite(layer, number, rows)
    decoder = _decoder(model)
    decoder.chosen = rows
    if HEAD in sites:
        decoder.head_chosen = sites[HEAD].rows = DeviceRows(config.max_loras, invariant)
    return sites


def changed(model: Model, config: LoraConfig) -> list[tuple[str, Linear]]:
    """The layers that adapters may change, by their paths."""
    _decoder(model)
    return [
        (path, part)
        for path, names, part in addressed(model.weight_table(), model)
        if (path.startswith("layers.") or path == HEAD) and type(part) in KINDS and is_target(names, config.targets)
        if isinstance(part, Linear)
    ]


def _decoder(model: Model) -> Decoder:
    name = model.config.architecture
    if not isinstance(model, Decoder) or model.config.implementation != "native":
        raise ConfigError(f"--enable-lora: {name} has no decoder of ours, which adapters need; leave the flag out")
    if model.adapters:
        raise ConfigError(f"--enable-lora: {name} has adapters of its own ({', '.join(model.adapters)})")
    return model


def is_target(names: list[str], targets: tuple[str, ...]) -> bool:
    """Whether one of a layer's modules is among the operator's targets (last components of names); (): all are."""
    return not targets or any(name.rpartition(".")[2] in targets for name in names)
