"""VitConfig: the settings of a plain vision transformer and of its projector, read from config.json.

In: the object `vision_config`, and the object around it, which describes the projector. Out: a frozen VitConfig. The
tower's model_type is its kind. Thread: any.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from engine.base.errors import ConfigError
from engine.base.request import Modality
from engine.checkpoint.section import MAX_LAYERS, Section
from engine.kernels.activation import BY_NAME, Activation


@dataclass(frozen=True, slots=True)
class ProjectorConfig:
    """From the tower's rows to the decoder's rows: norm, concatenated neighbours, linear layers."""

    out_size: int
    pool: int = 1  # pool x pool neighbours are averaged to one row, before everything else
    merge: int = 1  # merge x merge neighbours are concatenated to one row
    channels_first: bool = False  # order of concatenated values: by channel, else by patch
    norm: str = ""  # "rms": an RMSNorm before the concatenation, "layer": a LayerNorm after it, "": none
    norm_eps: float = 1e-5
    norm_offset: float = 0.0  # added to the weights of an RMSNorm
    norm_name: str = ""  # the norm's name in checkpoints; "": LLaVA's name
    reduces: bool = False  # a linear layer reduces concatenated neighbours to the width of one patch
    products: int = 2  # linear layers
    inner_size: int = 0  # width between two linear layers; 0: out_size
    bias: bool = True
    activation: Activation = Activation.GELU
    newline: bool = False  # a learned newline row; processors choose its places
    inner_name: str = ""  # name in checkpoints of the first of two linear layers; "": LLaVA's name
    outer_name: str = ""  # name in checkpoints of the last linear layer; "": LLaVA's name
    turned: str = ""  # tensor name of the last linear layer if stored transposed, [in_features, out_features]

    @property
    def shrink(self) -> int:
        """Patches along a side of the square that becomes one row."""
        return self.pool * self.merge


@dataclass(frozen=True, slots=True)
class VitConfig:
    """The configuration of a tower and its projector."""

    row_parts: ClassVar[int] = 1

    kind: str  # model_type
    projector: ProjectorConfig
    num_layers: int  # layers that are computed
    left_out: int  # further layers of the checkpoint, which are not computed
    hidden_size: int
    intermediate_size: int
    num_heads: int
    in_channels: int
    patch_size: int
    side: int  # patches along a side of every picture; 0: pictures differ in size
    eps: float
    activation: Activation
    class_token: bool = False
    patch_bias: bool = True
    pre_norm: bool = False  # a norm before the layers
    post_norm: bool = False  # a norm after the layers
    rms_norm: bool = False  # RMSNorms, not LayerNorms
    gated_mlp: bool = False
    bias: bool = True  # the linear layers have biases
    qkv_bias: bool = True
    joined_qkv: bool = False  # queries, keys and values are one tensor in the checkpoint
    qk_norm: bool = False  # an RMSNorm over all heads' queries of a row, and over all heads' keys
    layer_scale: bool = False  # the outputs of attention and MLP are scaled per channel
    bucketed: bool = False  # a patch's position index is computed from its fraction of the side
    learned_side: int = 0  # side of learned positions that are stretched over pictures of any size; 0: rotations
    rope_theta: float = 10_000.0  # base of the rotations
    modalities: tuple[Modality, ...] = ("image",)
    frame_rows: int = 0  # rows of a video's frame; 0: as many as a tile's

    @property
    def row_width(self) -> int:
        return self.projector.out_size


Reader = Callable[[Section], dict[str, Any]]


def read_vit(section: Section, projector: ProjectorConfig, feature_layer: int = -1) -> VitConfig:
    """The tower's configuration, checked. `feature_layer`: the layer whose output is used; -1: the last layer, 0: the
    input of the first layer.
    """
    kind = str(section.values.get("model_type"))
    if kind not in KINDS:
        raise ConfigError(
            f"{section.path}: model_type={kind!r} is not supported here; supported towers are {', '.join(KINDS)}"
        )
    hidden, inner, depth, heads = _UNSAID[kind]
    depth = section.integer("num_hidden_layers", depth, least=1, most=MAX_LAYERS)
    layers = feature_layer if feature_layer >= 0 else depth + 1 + feature_layer
    if not 1 <= layers <= depth:
        raise ConfigError(f"{section.path}: vision_feature_layer={feature_layer} of a tower of {depth} layers")
    act = str(section.values.get("hidden_act") or _ACTIVATION[kind])
    if act not in BY_NAME:
        raise ConfigError(f"{section.path}: hidden_act={act!r}; supported are {', '.join(BY_NAME)}")
    config = VitConfig(
        kind=kind,
        projector=projector,
        num_layers=layers,
        left_out=depth - layers,
        hidden_size=section.size("hidden_size", hidden),
        intermediate_size=section.size("intermediate_size", inner),
        num_heads=section.size("num_attention_heads", heads),
        in_channels=section.size("num_channels", 3),
        activation=BY_NAME[act],
        **KINDS[kind](section),
    )
    _check(config, section)
    return config


def _check(config: VitConfig, section: Section) -> None:
    learned = config.side or config.learned_side
    if config.hidden_size % config.num_heads or config.hidden_size // config.num_heads % (1 if learned else 4):
        raise ConfigError(
            f"{section.path}: hidden_size={config.hidden_size} over num_attention_heads={config.num_heads} must give "
            f"heads of whole numbers{'' if learned else ' of 4 (rotary positions along two axes)'}"
        )
    if config.side % config.projector.merge:
        raise ConfigError(
            f"{section.path}: {config.side} patches along a side do not make blocks of {config.projector.merge}"
        )


def _square(section: Section, key: str, default: int) -> int:
    """A number, or a list of two equal numbers."""
    given = section.values.get(key)
    if isinstance(given, list) and len(given) == 2 and given[0] == given[1]:
        return Section({key: given[0]}, section.path).size(key)
    return section.size(key, default)


def _tiles(section: Section, image: int, patch: int) -> dict[str, Any]:
    size, patch = _square(section, "image_size", image), _square(section, "patch_size", patch)
    if size < patch:
        raise ConfigError(f"{section.path}: image_size={size} is less than patch_size={patch}")
    return {"patch_size": patch, "side": size // patch}


def _clip(section: Section) -> dict[str, Any]:
    eps = section.number("layer_norm_eps", 1e-5)
    return {**_tiles(section, 224, 32), "eps": eps, "class_token": True, "patch_bias": False, "pre_norm": True}


def _siglip(section: Section) -> dict[str, Any]:
    return {**_tiles(section, 224, 16), "eps": section.number("layer_norm_eps", 1e-6)}


def _siglip2(section: Section) -> dict[str, Any]:
    count = section.size("num_patches", 256)
    side = math.isqrt(count)
    if side * side != count:
        raise ConfigError(f"{section.path}: num_patches={count} is no square")
    eps = section.number("layer_norm_eps", 1e-6)
    return {"patch_size": _square(section, "patch_size", 16), "side": 0, "learned_side": side, "eps": eps}


def _internvl(section: Section) -> dict[str, Any]:
    mean, norm = section.boolean("use_mean_pooling", True), section.values.get("norm_type") or "layer_norm"
    norms = ("layer_norm", "rms_norm") if mean else ("layer_norm",)  # the final norm is a LayerNorm
    for key, given, allowed in (
        ("norm_type", norm, norms),
        ("use_absolute_position_embeddings", section.boolean("use_absolute_position_embeddings", True), (True,)),
    ):
        if given not in allowed:
            raise ConfigError(
                f"{section.path}: {key}={given!r}; this tower is supported with {' or '.join(map(repr, allowed))}"
            )
    return {
        **_tiles(section, 448, 14),
        "eps": section.number("layer_norm_eps", 1e-6),
        "class_token": True,
        "qkv_bias": section.boolean("attention_bias", False),
        "rms_norm": norm == "rms_norm",
        "qk_norm": section.boolean("use_qk_norm", False),
        "layer_scale": True,
        "post_norm": not mean,
    }


def _intern_vit(section: Section) -> dict[str, Any]:
    norm = section.values.get("norm_type") or "rms_norm"
    if norm not in ("layer_norm", "rms_norm"):
        raise ConfigError(f"{section.path}: norm_type={norm!r}; this tower has 'layer_norm' or 'rms_norm'")
    return {
        **_tiles(section, 224, 14),
        "eps": section.number("layer_norm_eps", 1e-6),
        "class_token": True,
        "qkv_bias": section.boolean("qkv_bias", False),
        "joined_qkv": True,
        "rms_norm": norm == "rms_norm",
        "qk_norm": section.boolean("qk_normalization", True),
        "layer_scale": True,
    }


def _idefics3(section: Section) -> dict[str, Any]:
    eps = section.number("layer_norm_eps", 1e-6)
    return {**_tiles(section, 224, 32), "eps": eps, "post_norm": True, "bucketed": True}


def _minicpmv(section: Section) -> dict[str, Any]:
    tiles = _tiles(section, 980, 14)
    eps = section.number("layer_norm_eps", 1e-6)
    return {**tiles, "side": 0, "learned_side": tiles["side"], "eps": eps, "post_norm": True, "bucketed": True}


def _pixtral(section: Section) -> dict[str, Any]:
    rope = section.section("rope_parameters") if section.values.get("rope_parameters") else section
    return {
        "patch_size": section.size("patch_size", 16),
        "side": 0,
        "eps": 1e-5,
        "patch_bias": False,
        "pre_norm": True,
        "rms_norm": True,
        "gated_mlp": True,
        "bias": False,
        "qkv_bias": False,
        "rope_theta": rope.number("rope_theta", 10_000.0),
    }


KINDS: dict[str, Reader] = {
    "clip_vision_model": _clip,
    "siglip_vision_model": _siglip,
    "siglip2_vision_model": _siglip2,
    "internvl_vision": _internvl,
    "intern_vit_6b": _intern_vit,
    "pixtral": _pixtral,
    "idefics3": _idefics3,
    "minicpmv": _minicpmv,
}
_ACTIVATION = {
    "clip_vision_model": "quick_gelu",
    "siglip_vision_model": "gelu_pytorch_tanh",
    "siglip2_vision_model": "gelu_pytorch_tanh",
    "internvl_vision": "gelu",
    "intern_vit_6b": "gelu",
    "pixtral": "gelu",
    "idefics3": "gelu_pytorch_tanh",
    "minicpmv": "gelu_pytorch_tanh",
}
# Default sizes of transformers' class, which files may leave out: (hidden, inner, layers, heads).
_UNSAID = {
    "clip_vision_model": (768, 3072, 12, 12),
    "siglip_vision_model": (768, 3072, 12, 12),
    "siglip2_vision_model": (768, 3072, 12, 12),
    "internvl_vision": (1024, 4096, 24, 16),
    "intern_vit_6b": (3200, 12800, 48, 25),
    "pixtral": (1024, 4096, 24, 16),
    "idefics3": (1152, 3072, 12, 16),
    "minicpmv": (1152, 4304, 27, 16),
}
