"""config.json and generation_config.json -> ModelConfig: every oddity of checkpoints' configurations ends here.

In: a folder in Hugging Face or Mistral format (configuration only; engine/weights reads the weights). Out: frozen
dataclasses in which nothing is optional that a model computes with, so a model never asks whether a key was there. Both
spellings of rotary settings are read: `rope_parameters` (flat, or nested by layer type), or `rope_theta` with
`rope_scaling`.
Thread: any. Code named by `auto_map` is never imported: it is logged and ignored.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.errors import ConfigError
from engine.models import hf_rope
from engine.models.config import AudioConfig, LayerConfig, ModelConfig, TextConfig, VisionConfig
from engine.models.hf_files import read_json, read_root
from engine.models.hf_section import Section

log = logging.getLogger(__name__)

__all__ = [
    "AudioConfig",
    "LayerConfig",
    "ModelConfig",
    "TextConfig",
    "VisionConfig",
    "load_model_config",
    "resolve_dtype",
]

GENERATION_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens", "do_sample")
MAX_LAYERS = 4096  # of a decoder or a tower: a mistyped count must not fill the memory
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
COMPUTED = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True)
class _Family:
    """How one architecture's keys differ from Llama's."""

    sliding: str = "none"  # "none": the key is ignored; "always": on every layer; "switch": by use_sliding_window
    head_dim: int | None = None  # default; None = hidden_size / num_heads
    theta: float = 10_000.0


_QWEN2 = _Family(sliding="switch")
_THINKER = _Family(sliding="switch", theta=1_000_000.0)
_FAMILIES = {
    "LlamaForCausalLM": _Family(),
    "MistralForCausalLM": _Family(sliding="always"),
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen3ForCausalLM": _Family(sliding="switch", head_dim=128),
    "Qwen2_5OmniThinkerForConditionalGeneration": _THINKER,
    "Qwen2_5OmniForConditionalGeneration": _THINKER,
    "Qwen2_5OmniModel": _THINKER,  # the name in the released folders
}
SUPPORTED = tuple(_FAMILIES)


def load_model_config(folder: str | Path) -> ModelConfig:
    """Reads and checks the configuration of a checkpoint; ConfigError in one line when it cannot be served."""
    folder = Path(folder)
    root = read_root(folder)
    generation = read_json(folder / "generation_config.json", required=False)
    architecture = _architecture(root)
    if "auto_map" in root.values:
        log.warning("%s names code to import (auto_map); it is ignored", folder / "config.json")
    if root.values.get("quantization_config") is not None:
        method = root.section("quantization_config").values.get("quant_method", "unknown")
        raise ConfigError(
            f"config.json: the weights are quantized ({method}); this version reads float32, float16 and bfloat16 "
            "weights, so use the unquantized checkpoint"
        )
    family = _FAMILIES[architecture]
    thinker = root.section("thinker_config") if "thinker_config" in root.values else root
    body = thinker.section("text_config") if "text_config" in thinker.values else thinker
    text = _text(body, family, tie=thinker.boolean("tie_word_embeddings", False))
    vision = _vision(thinker.section("vision_config")) if "vision_config" in thinker.values else None
    audio = _audio(thinker.section("audio_config")) if "audio_config" in thinker.values else None
    _check_towers(text, vision, audio)
    modalities = ("text", *(("image", "video") if vision else ()), *(("audio",) if audio else ()))
    return ModelConfig(
        architecture=architecture,
        folder=str(folder),
        text=text,
        vision=vision,
        audio=audio,
        modalities=modalities,
        media_token_ids=_media_token_ids(thinker),
        bos_token_id=_first_id("bos_token_id", generation, root.values, thinker.values, body.values),
        eos_token_ids=_ids("eos_token_id", generation, root.values, thinker.values, body.values),
        max_position=hf_rope.max_position(body, text.layers[0].rope),
        torch_dtype=_dtype(root.values, thinker.values, body.values),
        mrope=bool(text.layers[0].rope.mrope_section),
        position_id_per_seconds=thinker.integer("position_id_per_seconds", 25) if vision else 0,
        generation={key: generation[key] for key in GENERATION_KEYS if generation.get(key) is not None},
        raw=root.values,
    )


def resolve_dtype(config: ModelConfig, requested: str, device: str) -> torch.dtype:
    """The dtype of activations and KV cache.

    On a CPU "auto" is float32, and weights saved as bfloat16 stay bfloat16 in memory: each is widened when read, which
    loses nothing. On an accelerator "auto" is bfloat16, whatever the checkpoint was saved as. float16 is computed
    nowhere: its range does not hold the residual streams of these models, and no kernel is tested in it.
    """
    if requested not in ("auto", *COMPUTED):
        raise ConfigError(f"--dtype {requested}: allowed are auto, {', '.join(COMPUTED)}")
    if requested != "auto":
        return DTYPES[requested]
    if device == "cpu":
        return torch.float32
    if config.torch_dtype == torch.float16:
        log.warning("the checkpoint is float16 and is computed in bfloat16; --dtype float32 keeps all its digits")
    return torch.bfloat16


def _architecture(root: Section) -> str:
    named = root.items("architectures", ())
    for name in named:
        if name in _FAMILIES:
            return name
    got = ", ".join(map(str, named)) or f"none (model_type {root.values.get('model_type')!r})"
    raise ConfigError(f"config.json: architecture {got} is not supported; supported are {', '.join(SUPPORTED)}")


def _text(body: Section, family: _Family, tie: bool) -> TextConfig:
    act = body.values.get("hidden_act", "silu")
    if act != "silu":
        raise ConfigError(f"{body.path}: hidden_act={act!r}; this architecture is supported with 'silu'")
    hidden = body.size("hidden_size")
    heads = body.size("num_attention_heads")
    kv_heads = body.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(f"{body.path}: num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}")
    if body.values.get("head_dim") is None and family.head_dim is None and hidden % heads:
        raise ConfigError(f"{body.path}: hidden_size={hidden} is no multiple of num_attention_heads={heads}")
    head_dim = body.size("head_dim", family.head_dim or hidden // heads)
    return TextConfig(
        vocab_size=body.size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=body.size("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=body.number("rms_norm_eps", 1e-6),
        attention_bias=body.boolean("attention_bias", False),
        mlp_bias=body.boolean("mlp_bias", False),
        tie_embeddings=tie,
        layers=_layers(body, family, head_dim),
    )


def _layers(body: Section, family: _Family, head_dim: int) -> tuple[LayerConfig, ...]:
    count = body.integer("num_hidden_layers", least=1, most=MAX_LAYERS)
    window = 0
    if family.sliding == "always":
        # A missing key is the 4,096 of the first release; later ones write null.
        window = 4096 if "sliding_window" not in body.values else body.integer("sliding_window", 0)
    elif family.sliding == "switch" and body.boolean("use_sliding_window", False):
        window = body.integer("sliding_window", 0)
    kinds = body.items("layer_types", ())
    if not kinds:
        first = body.integer("max_window_layers", 28) if family.sliding == "switch" else 0
        kinds = ["sliding_attention" if window and i >= first else "full_attention" for i in range(count)]
    elif family.sliding == "always":
        kinds = ["sliding_attention" if window else "full_attention"] * count
    if len(kinds) != count:
        raise ConfigError(f"{body.path}: layer_types has {len(kinds)} entries for num_hidden_layers={count}")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise ConfigError(f"{body.path}: layer type {kind!r} is not supported by this architecture")
    ropes = {kind: hf_rope.read(body, kind, head_dim, family.theta) for kind in set(kinds)}
    return tuple(LayerConfig(window if kind == "sliding_attention" else 0, ropes[kind]) for kind in kinds)


def _vision(section: Section) -> VisionConfig:
    act = section.values.get("hidden_act", "silu")
    if act != "silu":
        raise ConfigError(f"{section.path}: hidden_act={act!r}; this tower is supported with 'silu'")
    rope = section.section("rope_parameters") if section.values.get("rope_parameters") else section
    full = section.items("fullatt_block_indexes", (7, 15, 23, 31))
    config = VisionConfig(
        num_layers=section.integer("depth", 32, least=1, most=MAX_LAYERS),
        hidden_size=section.size("hidden_size"),
        intermediate_size=section.size("intermediate_size"),
        num_heads=section.size("num_heads"),
        in_channels=section.size("in_channels", section.size("in_chans", 3)),
        patch_size=section.size("patch_size", 14),
        temporal_patch_size=section.size("temporal_patch_size", 2),
        merge_size=section.size("spatial_merge_size", 2),
        window_size=section.size("window_size", 112),
        full_layers=frozenset(full),
        out_hidden_size=section.size("out_hidden_size"),
        rope_theta=rope.number("rope_theta", 10_000.0),
    )
    if config.hidden_size % config.num_heads or config.hidden_size // config.num_heads % 4:
        raise ConfigError(
            f"{section.path}: hidden_size={config.hidden_size} over num_heads={config.num_heads} must give heads "
            "of a multiple of 4 (rotary positions along two axes)"
        )
    if config.window_size < config.patch_size * config.merge_size:
        raise ConfigError(
            f"{section.path}: window_size={config.window_size} pixels must hold a merge block of "
            f"{config.merge_size} x {config.merge_size} patches of {config.patch_size} pixels"
        )
    return config


def _audio(section: Section) -> AudioConfig:
    act = section.values.get("activation_function", "gelu")
    if act != "gelu":
        raise ConfigError(f"{section.path}: activation_function={act!r}; this tower is supported with 'gelu'")
    config = AudioConfig(
        num_mel_bins=section.size("num_mel_bins", 128),
        num_layers=section.integer("encoder_layers", least=1, most=MAX_LAYERS),
        num_heads=section.size("encoder_attention_heads"),
        hidden_size=section.size("d_model"),
        intermediate_size=section.size("encoder_ffn_dim"),
        max_positions=section.size("max_source_positions", 1500),
        n_window=section.size("n_window", 100),
        output_dim=section.size("output_dim"),
    )
    if config.hidden_size % config.num_heads or config.hidden_size % 2 or config.hidden_size < 4:
        raise ConfigError(f"{section.path}: d_model={config.hidden_size} must be even and a multiple of its heads")
    if config.n_window > config.max_positions:
        raise ConfigError(
            f"{section.path}: n_window={config.n_window} frames need as many positions; "
            f"max_source_positions={config.max_positions}"
        )
    return config


def _check_towers(text: TextConfig, vision: VisionConfig | None, audio: AudioConfig | None) -> None:
    widths = {"vision_config.out_hidden_size": vision.out_hidden_size if vision else text.hidden_size}
    widths["audio_config.output_dim"] = audio.output_dim if audio else text.hidden_size
    for name, width in widths.items():
        if width != text.hidden_size:
            raise ConfigError(f"config.json: {name}={width} must equal the decoder's hidden_size={text.hidden_size}")


def _media_token_ids(thinker: Section) -> dict[str, int]:
    """Placeholder ids by modality; older files say `_index`, newer ones `_id`."""
    found = {}
    for name in ("image", "video", "audio"):
        for key in (f"{name}_token_id", f"{name}_token_index"):
            if thinker.values.get(key) is not None:
                found[name] = thinker.integer(key)
    for name in ("vision_start", "vision_end", "audio_start", "audio_end"):
        key = f"{name}_token_id"
        if thinker.values.get(key) is not None:
            found[name] = thinker.integer(key)
    return found


def _ids(key: str, *sources: dict[str, Any]) -> tuple[int, ...]:
    """The first source that names the key decides; one id or a list of them."""
    for source in sources:
        value = source.get(key)
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if not all(type(item) is int and item >= 0 for item in ids):
                raise ConfigError(f"{key}={value!r} must be a token id or a list of them")
            return tuple(ids)
    return ()


def _first_id(key: str, *sources: dict[str, Any]) -> int | None:
    ids = _ids(key, *sources)
    return ids[0] if ids else None


def _dtype(*sources: dict[str, Any]) -> torch.dtype:
    for source in sources:
        name = source.get("dtype") or source.get("torch_dtype")
        if name is not None:
            name = str(name).removeprefix("torch.")
            if name not in DTYPES:
                raise ConfigError(f"config.json: dtype {name!r} is not supported; supported are {', '.join(DTYPES)}")
            return DTYPES[name]
    return torch.float32
