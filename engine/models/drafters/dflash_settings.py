"""Reads the configuration of a DFlash drafter, in both dialects.

    flat         `architectures: [DFlashDraftModel]`, the decoder's keys at the top, options there or in
                 `dflash_config`; target_layer_ids n means the output of layer n
    speculators  `speculators_model_type: dflash`; aux_hidden_state_layer_ids n means the input of layer n

Formats: the files of z-lab and vllm-project/speculators, and vLLM's reader of them. Thread: any.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from engine.base.drafts import FLAG
from engine.base.errors import ConfigError
from engine.base.model_config import ModelConfig, TextConfig
from engine.checkpoint.rope import SLIDING
from engine.checkpoint.section import Section
from engine.checkpoint.text import every_layer, read_text, refuse
from engine.models.drafters.drafter_config import DrafterConfig, Files
from engine.models.drafters.fit import check_decoder, check_width

CLASSES = ("DFlashDraftModel", "DFlashSpeculator")
BEHIND = "target_layer_ids"  # numbers of layers whose outputs are read
BEFORE = "aux_hidden_state_layer_ids"  # numbers of layers whose inputs are read
MASK_FILE = "mask_embedding.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig(DrafterConfig):
    """A drafter that guesses blocks."""

    block_size: int  # the newest token and masks
    skipped: int  # see MaskedDrafter
    mask_id: int
    whole: tuple[bool, ...]  # for each layer: queries see their whole block, not only the block up to themselves
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0  # 0: none

    @property
    def scales_logits(self) -> bool:
        """Whether the files say how logits follow from the head's products; else they do as in the target."""
        return self.logit_scale != 1.0 or self.logit_softcap != 0.0

    def scaled(self, products: Tensor) -> Tensor:
        """Logits of the head's products."""
        if self.logit_scale != 1.0:
            products = products * self.logit_scale
        return (products / self.logit_softcap).tanh() * self.logit_softcap if self.logit_softcap else products


def read(files: Files, target: ModelConfig) -> BlockConfig:
    """The configuration of a drafter. Raises ConfigError."""
    options = files.options("dflash_config")
    refuse(options, projector_type="dflash", sample_from_anchor=False)
    return BlockConfig(**common(files, options, target, skipped=1))


def common(files: Files, options: Section, target: ModelConfig, skipped: int) -> dict[str, Any]:
    """The fields of BlockConfig. Raises ConfigError."""
    text, whole = decoder_of(files, options, target)
    block_size = options.integer("block_size", least=1 + skipped)
    refuse(options, use_aux_hidden_state=True, logit_scale=1.0)
    streams, named = _streams(options, len(target.text.layers), len(text.layers))
    return {
        "folder": files.folder,
        "text": text,
        "vocab_size": options.size("draft_vocab_size", text.vocab_size),
        "streams": streams,
        "stream_width": options.size("target_hidden_size", text.hidden_size),
        "torch_dtype": files.torch_dtype,
        "num_tokens": files.num_tokens or block_size - skipped,
        "most_tokens": block_size - skipped,
        "warning": "" if named else unnamed(files.folder, streams),
        "block_size": block_size,
        "skipped": skipped,
        "mask_id": mask_of(options, files.folder, text.vocab_size),
        "whole": whole,
        "embedding_scale": options.number("input_embedding_scale", 1.0),
        "logit_scale": options.number("output_multiplier", 1.0),
        "logit_softcap": max(options.number("final_logit_softcapping", 0.0), 0.0),
    }


def decoder_of(files: Files, options: Section, target: ModelConfig) -> tuple[TextConfig, tuple[bool, ...]]:
    """The drafter's layers, and for each whether its queries see their whole block. Raises ConfigError."""
    body, root = files.body, files.root
    if body.values.get("model_type", "qwen3") != "qwen3":
        raise ConfigError(f"{body.path}: model_type={body.values['model_type']!r} of a drafter; supported is 'qwen3'")
    refuse(options, is_neox_style=True)
    kinds = body.items("layer_types", ())
    slides = options.boolean("use_swa", False)
    text = read_text(body, root, sliding="layers" if SLIDING in kinds else "none", head_dim=128, qk_norm="head")
    check_decoder(text, target, body.path)
    check_width(options.size("target_hidden_size", text.hidden_size), target, root.path)
    # use_swa without sliding layer_types: every layer has the window.
    windowed = [kind == SLIDING for kind in kinds] if SLIDING in kinds else [slides] * len(text.layers)
    window = 0
    if any(windowed):
        window = options.size("swa_window_size", body.integer("sliding_window", 0) or None)
    both = options.boolean("sliding_window_non_causal", False)
    causal = options.values.get("is_causal", options.values.get("causal"))
    if causal not in (None, True, False):
        raise ConfigError(f"{options.path}: causal={causal!r} must be true or false")
    whole = tuple(not (SLIDING in kinds and slid) or both if causal is None else not causal for slid in windowed)
    sinks = options.boolean("attention_sink_bias", body.boolean("add_swa_attention_sink_bias", False))
    layers = tuple(replace(layer, window=window * slid) for layer, slid in zip(text.layers, windowed, strict=True))
    return every_layer(replace(text, layers=layers, tie_embeddings=False), sinks=sinks), whole


def mask_of(options: Section, folder: str, vocab_size: int) -> int:
    """The token that stands for a mask. Raises ConfigError."""
    if (Path(folder) / MASK_FILE).exists():
        raise ConfigError(
            f"{FLAG}: {folder}: {MASK_FILE} is not read; add the embedding to the safetensors file as `mask_embedding`"
        )
    if "mask_token_id" not in options.values:
        raise ConfigError(f"{FLAG}: {options.path}: mask_token_id is missing; it names the token of the masks")
    return options.integer("mask_token_id", most=vocab_size - 1)


def _streams(options: Section, layers: int, own: int) -> tuple[tuple[int, ...], bool]:
    """Numbers of the target's streams that the drafter reads, and whether the files name them."""
    if options.values.get(BEHIND):
        return _numbers(options, BEHIND, 0, layers - 1, 1), True
    if options.values.get(BEFORE):
        return _numbers(options, BEFORE, 1, layers, 0), True
    if own == 1:
        return (layers // 2 + 1,), False
    usual = [round(1 + number * (layers - 4) / (own - 1)) for number in range(own)]
    return tuple(min(max(number, 0), layers - 1) + 1 for number in usual), False


def _numbers(options: Section, key: str, least: int, most: int, add: int) -> tuple[int, ...]:
    given: Any = options.values[key]
    if not isinstance(given, list) or not all(type(number) is int and least <= number <= most for number in given):
        raise ConfigError(
            f"{FLAG}: {options.path}: {key}={given!r}: the target has {most + add} layers; whole numbers from {least} "
            f"to {most} name the streams behind them"
        )
    return tuple(number + add for number in given)


def unnamed(folder: str, streams: tuple[int, ...]) -> str:
    """The warning about files that name no layers."""
    return (
        f"{folder} names no layers: the drafter reads the inputs of the target's layers "
        f"{', '.join(map(str, streams))}, which may not be those of its training"
    )
