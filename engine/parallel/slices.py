"""A rank's slice of a model's configuration, and which models can be dealt out.

In: the configuration of the whole checkpoint. Out: the configuration from which the family's model is built for a rank:
fewer heads and channels (mixers.py), narrower MLPs, a part of the head's vocabulary. Layers built from a slice need not
know that it is one. Thread: any; no state.
"""

from __future__ import annotations

from dataclasses import replace

from engine.base.config import EngineConfig
from engine.base.dealing import Section, share, width, width_of
from engine.base.errors import ConfigError
from engine.base.mixers import BothConfig
from engine.base.model_config import LayerConfig, ModelConfig, TextConfig
from engine.parallel.mixers import counts_of, mixer_of

MOST_RANKS = 8
FLAG = "--tensor-parallel-size"
EXPERTS_FLAG = "--enable-expert-parallel"


def check_dealt(config: ModelConfig, asked: EngineConfig) -> None:
    """Raises ConfigError if the model cannot be dealt out over as many ranks as the settings ask for."""
    ranks = asked.tensor_parallel
    if ranks > MOST_RANKS:
        raise ConfigError(f"{FLAG} {ranks}: at most {MOST_RANKS} ranks")
    if asked.lora is not None:
        raise ConfigError(f"{FLAG} {ranks}: --enable-lora is not served on several ranks yet; leave one of them out")
    if lacking := _lacking(config):
        raise ConfigError(f"{FLAG} {ranks}: {config.architecture} {lacking}; leave the flag out")
    check_experts(config, asked)
    works = [each for each in range(1, MOST_RANKS + 1) if _divides(config.text, each)]
    if ranks not in works:
        raise ConfigError(
            f"{FLAG} {ranks}: {_counted(config.text)} cannot be dealt out so; possible: {', '.join(map(str, works))}"
        )


def check_experts(config: ModelConfig, asked: EngineConfig) -> None:
    """Raises ConfigError if ranks shall have whole experts and cannot."""
    counts = {layer.experts.routing.num_experts for layer in config.text.layers if layer.experts is not None}
    ranks = asked.tensor_parallel
    if not asked.ranks.whole_experts or config.implementation == "transformers":
        return
    if not counts:
        raise ConfigError(f"{EXPERTS_FLAG}: {config.architecture} has no experts; leave the flag out")
    if config.is_encoder and ranks > 1:
        raise ConfigError(f"{EXPERTS_FLAG}: ranks share the width of {config.architecture}'s experts; leave it out")
    if min(counts) < ranks:
        raise ConfigError(
            f"{EXPERTS_FLAG}: {min(counts)} experts of a layer are fewer than {ranks} ranks; give {FLAG} "
            f"{min(counts)} or less, or leave {EXPERTS_FLAG} out: each rank then has a part of every expert"
        )


def _lacking(config: ModelConfig) -> str:
    """Why a model is not dealt out; "": it is."""
    reasons = {
        "runs through transformers' modules, which have no slices": config.implementation == "transformers",
        "attends to an encoder's rows, which is not dealt out yet": bool(config.encoder_prefix),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _divides(text: TextConfig, ranks: int) -> bool:
    """Whether the heads of all layers can be dealt out, and what replaces heads."""
    if not all(count.divides(ranks) for layer in text.layers for count in counts_of(layer.mixer)):
        return False
    counts = {text.of_layer(layer).num_kv_heads for layer in text.layers if _attends(layer)}
    fits = all(kv % ranks == 0 or ranks % kv == 0 for kv in counts)
    copies = any(kv < ranks for kv in counts)
    return (not counts or text.num_heads % ranks == 0) and fits and not (copies and text.qkv_layout == "by head")


def _attends(layer: LayerConfig) -> bool:
    return layer.mixer is None or isinstance(layer.mixer, BothConfig)


def _counted(text: TextConfig) -> str:
    """What a number of ranks must divide, in words."""
    heads = [f"{text.num_heads} heads", f"{text.num_kv_heads} key-value heads"]
    found = heads if any(map(_attends, text.layers)) else []
    counts = (count for layer in text.layers for count in counts_of(layer.mixer))
    found += dict.fromkeys(f"{count.units} {count.name}" for count in counts)
    return " and ".join(filter(None, (", ".join(found[:-1]), found[-1])))


def config_of(config: ModelConfig, rank: int, ranks: int, whole_experts: bool = False) -> ModelConfig:
    """The configuration of one rank's slice, without quantisation: the whole model's parts have the schemes.

    whole_experts: the rank has some of the experts; else a part of the width of each."""
    text = config.text
    sliced = replace(
        text,
        num_heads=max(1, text.num_heads // ranks),  # 1: no layer attends
        num_kv_heads=max(1, text.num_kv_heads // ranks),
        intermediate_size=width_of(width(text.intermediate_size), rank, ranks),
        layers=tuple(_layer_of(layer, rank, ranks, whole_experts) for layer in text.layers),
    )
    raw = {key: value for key, value in config.raw.items() if key != "quantization_config"}
    return replace(config, text=sliced, raw=raw)


def _layer_of(layer: LayerConfig, rank: int, ranks: int, whole_experts: bool) -> LayerConfig:
    heads, inner, experts = layer.num_kv_heads, layer.intermediate_size, layer.experts
    if experts is not None:
        shared = experts.shared_width
        experts = replace(experts, shared_width=width_of(width(shared), rank, ranks) if shared else 0)
        if whole_experts:
            first, end = share(Section(experts.routing.num_experts), rank, ranks)
            experts = replace(experts, routing=replace(experts.routing, first=first), held=end - first)
        else:
            media = experts.media_width
            media = width_of(width(media), rank, ranks) if media else 0
            experts = replace(experts, width=width_of(width(experts.width), rank, ranks), media_width=media)
    return replace(
        layer,
        experts=experts,
        mixer=mixer_of(layer.mixer, ranks),
        num_kv_heads=max(1, heads // ranks) if heads else 0,
        intermediate_size=width_of(width(inner), rank, ranks) if inner else 0,
    )
