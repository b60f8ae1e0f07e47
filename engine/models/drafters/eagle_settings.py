"""Reads the configuration of an EAGLE-3 head, in both dialects.

Flat files have some keys under `eagle_config`. Formats: the files of SafeAILab/EAGLE and vllm-project/speculators, and
vLLM's reader of them. Thread: any.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.base.drafts import FLAG
from engine.base.errors import ConfigError
from engine.base.model_config import ModelConfig
from engine.checkpoint.rope import SLIDING
from engine.checkpoint.section import Section
from engine.checkpoint.text import read_text
from engine.models.drafters.drafter_config import DrafterConfig, Files
from engine.models.drafters.fit import check_decoder, check_width

CLASSES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3DraftModel", "Eagle3Speculator")
MASKS = ("mask_token_id", "ptd_token_id")
IDS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig(DrafterConfig):
    """An EAGLE-3 head."""

    norm_before_residual: bool
    norm_before_fc: bool  # the joined streams pass one norm
    fc_norm: bool  # each stream passes its own norm
    norm_output: bool  # the fed back features have passed the last norm
    mask_id: int | None  # the token of the masks of a head that guesses all drafts in one pass; None: it does not
    joins_streams: bool  # `fc` makes features of the streams; else they are the target's hidden states, normed


def read(files: Files, target: ModelConfig) -> EagleConfig:
    """The configuration of a head. Raises ConfigError."""
    body, root, options = files.body, files.root, files.options("eagle_config")
    if body.values.get("model_type", "llama") != "llama":
        raise ConfigError(f"{body.path}: model_type={body.values['model_type']!r} of a drafter; supported is 'llama'")
    windowed = SLIDING in body.items("layer_types", ())
    text = read_text(body, root, sliding="layers" if windowed else "none")
    check_decoder(text, target, body.path)
    joins = options.boolean("use_aux_hidden_state", True)
    width = options.size("target_hidden_size", text.hidden_size)
    check_width(width, target, root.path)
    if not joins and text.hidden_size != width:
        raise ConfigError(
            f"{FLAG}: {root.path}: use_aux_hidden_state=false with hidden_size={text.hidden_size}: without fc the "
            f"drafter reads hidden states of {width} numbers as they are; both sizes must be equal"
        )
    streams = _streams(options, len(target.text.layers)) if joins else (len(target.text.layers),)
    warning = (
        ""
        if not joins or any(options.values.get(key) for key in IDS)
        else (
            f"{files.folder} names no layers: the drafter reads the inputs of the target's layers "
            f"{', '.join(map(str, streams))}, which may not be those of its training"
        )
    )
    return EagleConfig(
        folder=files.folder,
        text=replace(text, tie_embeddings=False),
        vocab_size=options.size("draft_vocab_size", text.vocab_size),
        streams=streams,
        stream_width=width,
        norm_before_residual=options.boolean("norm_before_residual", False),
        norm_before_fc=joins and options.boolean("norm_before_fc", False),
        fc_norm=joins and options.boolean("fc_norm", False),
        norm_output=options.boolean("norm_output", False),
        torch_dtype=files.torch_dtype,
        num_tokens=files.num_tokens,
        joins_streams=joins,
        mask_id=_mask(options, text.vocab_size),
        warning=warning,
    )


def _mask(options: Section, vocab_size: int) -> int | None:
    """The token of the masks; None: the head guesses one draft in a pass. Raises ConfigError."""
    if not options.boolean("parallel_drafting", options.values.get("speculators_model_type") == "peagle"):
        return None
    key = next((key for key in MASKS if key in options.values), None)
    if key is None:
        raise ConfigError(f"{FLAG}: {options.path}: {MASKS[0]} is missing; it names the token of the masks")
    return options.integer(key, most=vocab_size - 1)


def _streams(options: Section, layers: int) -> tuple[int, ...]:
    """Numbers of the target's streams that the drafter reads; files without them mean the usual three."""
    given = next((options.values[key] for key in IDS if options.values.get(key)), None)
    if given is None:
        return tuple(min(max(number, 1), layers) for number in (2, layers // 2, layers - 3))
    if not isinstance(given, list) or not all(type(number) is int and 1 <= number <= layers for number in given):
        raise ConfigError(
            f"{FLAG}: {options.path}: {IDS[0]}={given!r}: the target has {layers} layers; whole numbers from 1 to "
            f"{layers} name the streams behind them"
        )
    return tuple(given)
