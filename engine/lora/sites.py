"""Sites: gives the layers of a model that adapters may change their places, before the weights are read.

Thread: device, at start. In: a model with empty parts. Out: the same model, whose layers make weights with places; and
the sites by the layer's path in the model's tree (`layers.3.attention.qkv`), by which adapters name their matrices.
"""

from __future__ import annotations

from pathlib import Path

from engine.base.config import LoraConfig
from engine.base.errors import ConfigError
from engine.encoders.qwen_vl.tower import QwenVisionTower
from engine.encoders.tower import each
from engine.kernels.lora.matrices import SiteShape
from engine.layers.adapted import Chosen, OwnAndNamed, OwnAndPlaced, Site, TokenAdapters
from engine.layers.embed import Head
from engine.layers.linear import GatedLinear, Linear
from engine.layers.moe import Experts
from engine.layers.norm import RMSNorm
from engine.layers.padded import PaddedGated, PaddedLinear
from engine.layers.placed import ItemRows, PlacedExperts, PlacedSite, PlaceRows
from engine.layers.placed_device import DeviceExperts, DeviceItem, DevicePlaces, DeviceRows, DeviceSite
from engine.lora.named import changed_by
from engine.lora.targets import BASE
from engine.models.base.decoder import Decoder
from engine.models.base.model import Model
from engine.weights.gguf import GGUF
from engine.weights.table import addressed

KINDS = (Linear, GatedLinear, Head, PaddedLinear, PaddedGated)
HEAD = "head"  # the path of the logits' matrix
# Names that mean both products of experts in --lora-target-modules.
EXPERTS = ("experts", "gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3")

HostSites = dict[str, PlacedSite | PlacedExperts]
DeviceSites = dict[str, DevicePlaces]


def give_host_sites(model: Model, config: LoraConfig) -> HostSites:
    """Gives each layer of a model on a CPU that adapters may change a site. Raises ConfigError if the model cannot have
    adapters by name."""
    decoder, sites, items = _decoder(model), HostSites(), ItemRows()
    first = len(decoder.adapters)
    rows = PlaceRows(first)
    decoder.chosen = with_own(decoder, rows, config)
    for path, layer in changed(model, config):
        if isinstance(layer, Experts):
            layer.site = sites[path] = PlacedExperts(layer.pieces, rows, config.max_loras)
            continue
        own = rows
        if path == HEAD:
            own = decoder.head_chosen = PlaceRows(first)
        elif is_in_tower(decoder, path):
            own = decoder.of_items = items
        sites[path] = placed = PlacedSite(layer, own, config.max_loras)
        layer.site = OwnAndPlaced(layer.site, placed) if isinstance(layer.site, Site) else placed
    return sites


def give_device_sites(model: Model, config: LoraConfig, invariant: bool) -> DeviceSites:
    """The same for a model on an accelerator; `invariant`: --deterministic."""
    decoder, sites, items = _decoder(model), DeviceSites(), DeviceItem(config.max_loras, invariant, model.device)
    first = len(decoder.adapters)
    rows = DeviceRows(config.max_loras, invariant, first)
    decoder.chosen = with_own(decoder, rows, config)
    for tower in each(model.towers):
        if isinstance(tower, QwenVisionTower) and tower.graphs is not None:
            tower.graphs.may_replay = lambda: not items.acts
    for number, (path, layer) in enumerate(changed(model, config)):
        if isinstance(layer, Experts):
            shape = SiteShape(number, layer.in_features, layer.pieces, layer.num_experts)
            layer.site = sites[path] = DeviceExperts(shape, rows)
            continue
        own: DeviceRows | DeviceItem = rows
        if path == HEAD:
            own = decoder.head_chosen = DeviceRows(config.max_loras, invariant, first)
        elif is_in_tower(decoder, path):
            own = decoder.of_items = items
        sites[path] = placed = DeviceSite(SiteShape(number, layer.in_features, layer.out_features), own)
        layer.site = OwnAndPlaced(layer.site, placed) if isinstance(layer.site, Site) else placed
    _connect(decoder, sites)
    return sites


def _connect(decoder: Decoder, sites: DeviceSites) -> None:
    """Which layer reads what another layer makes, where a kernel of few rows may compute A x for it. A layer that reads
    other rows after all computes A x itself."""
    for number, layer in enumerate(decoder.layers):
        norms = (("attention.qkv", layer.attention_norm), ("mlp.gate_up", getattr(layer, "mlp_norm", None)))
        for path, norm in norms:
            reader = sites.get(f"layers.{number}.{path}")
            if reader is not None and isinstance(norm, RMSNorm):
                reader.norm = norm
        gate_up = sites.get(f"layers.{number}.mlp.gate_up")
        if gate_up is not None:
            gate_up.following = sites.get(f"layers.{number}.mlp.down")


def with_own(decoder: Decoder, rows: TokenAdapters, config: LoraConfig) -> TokenAdapters:
    """The adapters by name, and the checkpoint's own if the decoder has any."""
    own = decoder.chosen
    return OwnAndNamed(own, rows, len(decoder.adapters), config.max_loras) if isinstance(own, Chosen) else rows


def changed(model: Model, config: LoraConfig) -> list[tuple[str, Linear | Experts]]:
    """The layers that adapters may change, by their paths; of experts both products, or none. Raises ConfigError for
    names of modules that the model lacks."""
    found: list[tuple[str, Linear | Experts]] = []
    known = set[str]()
    for path, names, part in addressed(model.weight_table(), model):
        if not path.startswith("layers.") and path != HEAD and not is_in_tower(model, path):
            continue
        if isinstance(part, Experts) and not part.first:
            words = {*EXPERTS, *last_words(names)}
        elif isinstance(part, Linear) and type(part) in KINDS and part.fold == (part.in_features,):
            words = last_words(names)
        else:
            continue
        known |= words
        if not config.targets or words & set(config.targets):
            found.append((path, part))
    if unknown := sorted(set(config.targets) - known):
        raise ConfigError(
            f"--lora-target-modules {' '.join(unknown)}: the model has no such module; it has {' '.join(sorted(known))}"
        )
    named = changed_by(model, config.named) if config.named else None
    if named is None:
        return found
    blocks = {block(path) for path in named}  # of experts both products
    return [
        (path, part) for path, part in found if path in named or (isinstance(part, Experts) and block(path) in blocks)
    ]


def block(path: str) -> str:
    """The path of the object that holds the layer."""
    return path.rpartition(".")[0]


def is_in_tower(model: Model, path: str) -> bool:
    """Whether the layer belongs to a tower, or to the connector behind a tower."""
    return getattr(model, path.partition(".")[0], None) in list(each(model.towers))


def last_words(names: list[str]) -> set[str]:
    """The last components of names of modules."""
    return {name.removesuffix(BASE).rpartition(".")[2] for name in names}


def _decoder(model: Model) -> Decoder:
    name = model.config.architecture
    if not isinstance(model, Decoder) or model.config.implementation != "native":
        raise ConfigError(f"--enable-lora: {name} has no decoder of ours, which adapters need; leave the flag out")
    if (Path(model.config.folder) / GGUF).exists():
        raise ConfigError(
            f"--enable-lora: {name} comes from a GGUF file, whose rows have another order; serve safetensors"
        )
    return model
