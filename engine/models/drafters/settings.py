"""Reads the configuration of a drafter's folder, in both dialects, and checks that the drafter fits its target.

    flat         `architectures: [LlamaForCausalLMEagle3]`, the decoder's keys at the top, some under `eagle_config`
    speculators  `speculators_model_type: eagle3`, the decoder's keys in `transformer_layer_config`

In: a folder, and the target's ModelConfig. Out: DrafterConfig. ConfigError names the key that does not fit. Formats:
the files of SafeAILab/EAGLE and vllm-project/speculators, and vLLM's reader of them. Thread: any.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from engine.base.config import EngineConfig
from engine.base.drafts import (
    BY_FILES,
    DRAFT_MODEL,
    EAGLE3,
    FLAG,
    LONGEST,
    MOST_DRAFTS,
    MTP,
    NGRAM,
    SUFFIX,
    DraftConfig,
    check_keys,
    draft_config,
)
from engine.base.errors import ConfigError
from engine.base.model_config import ModelConfig, TextConfig
from engine.checkpoint.config import saved_dtype
from engine.checkpoint.files import read_json
from engine.checkpoint.rope import SLIDING
from engine.checkpoint.section import Section
from engine.checkpoint.text import read_text
from engine.models.drafters.mtp import check_mtp
from engine.models.registry import MODALITIES, load_model_config

CLASSES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3DraftModel", "Eagle3Speculator")
IDS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """One drafter as the engine sees it."""

    folder: str
    text: TextConfig  # its decoder; vocab_size counts the target's tokens
    vocab_size: int  # of its head
    streams: tuple[int, ...]  # of the target's residual streams those that it reads: n is the input of layer n
    stream_width: int
    norm_before_residual: bool
    norm_before_fc: bool  # the joined streams pass one norm
    fc_norm: bool  # each stream passes its own norm
    norm_output: bool  # the fed back features have passed the last norm
    torch_dtype: torch.dtype
    num_tokens: int  # drafts for which the file was made; 0: not given
    names_streams: bool  # the file names the streams; else they are the usual three
    joins_streams: bool  # `fc` makes features of the streams; else they are the target's hidden states, normed


def drafts_of(config: EngineConfig, target: ModelConfig) -> tuple[DraftConfig, DrafterConfig | None] | None:
    """The drafts that the operator requests, with their drafter, if any; None: no drafts. Raises ConfigError."""
    drafts = draft_config(config.speculative)
    if drafts is None or drafts.method in (NGRAM, SUFFIX):
        return None if drafts is None else (drafts, None)
    if drafts.method == DRAFT_MODEL or (drafts.method == BY_FILES and is_whole(drafts.model)):
        return draft_model_of(config, drafts, target), None
    check_keys(config.speculative, drafts.method or EAGLE3)
    if config.load_format == "dummy":
        raise ConfigError(f"{FLAG}: a drafter has no random weights; leave out --load-format dummy, or name ngram")
    if drafts.method == MTP:
        check_target(target)
        check_mtp(target)
        return drafts, None
    drafter = read_drafter(drafts.model, target)
    number = drafts.num_tokens or drafter.num_tokens
    if not number:
        raise ConfigError(f"{FLAG}: num_speculative_tokens is missing; give a whole number from 1 to {MOST_DRAFTS}")
    return replace(drafts, num_tokens=number, method=EAGLE3), drafter


def is_whole(folder: str) -> bool:
    """Whether a folder holds a model with layers, embedding and head of its own, rather than a head over a target."""
    values = read_json(Path(folder) / "config.json")
    return "speculators_model_type" not in values and not set(CLASSES) & set(values.get("architectures") or ())


def draft_model_of(config: EngineConfig, drafts: DraftConfig, target: ModelConfig) -> DraftConfig:
    """The drafts of a small model, whose configuration is checked. Raises ConfigError."""
    model = read_draft_model(drafts.model, target)
    held = min(model.max_position, config.max_model_len or target.max_position)
    if drafts.longest > held:
        raise ConfigError(
            f"{FLAG}: {LONGEST}={drafts.longest}: {drafts.model} holds {model.max_position} tokens and {target.folder} "
            f"{config.max_model_len or target.max_position}; give at most {held}, or leave it out"
        )
    if not drafts.num_tokens:
        raise ConfigError(f"{FLAG}: num_speculative_tokens is missing; give a whole number from 1 to {MOST_DRAFTS}")
    return replace(drafts, method=DRAFT_MODEL, longest=drafts.longest or held)


def read_draft_model(folder: str, target: ModelConfig) -> ModelConfig:
    """The configuration of a small decoder for drafts; its towers are left out. Raises ConfigError."""
    try:
        model = load_model_config(folder, without=MODALITIES)
    except ConfigError as error:
        raise ConfigError(f"{FLAG}: {folder}: {error}") from None
    if model.implementation != "native" or model.pooling is not None or model.encoder_prefix:
        raise ConfigError(
            f"{FLAG}: {folder}: {model.architecture} cannot draft; draft models are decoders of text that are served "
            "natively, such as LlamaForCausalLM or Qwen3ForCausalLM"
        )
    if target.encoder_prefix:
        raise ConfigError(f"{FLAG}: no draft model reads the sound of {target.architecture}; leave the flag out")
    same = check_tokenizer(Path(folder), Path(target.folder))
    if model.text.vocab_size != target.text.vocab_size and not same:  # the same tokenizer with other padding
        raise ConfigError(
            f"{FLAG}: the draft model {folder} has {model.text.vocab_size} tokens (vocab_size), the target "
            f"{target.folder} has {target.text.vocab_size}, and not both have the same tokenizer.json; name a smaller "
            "model of the same family"
        )
    return model


def read_drafter(folder: str, target: ModelConfig) -> DrafterConfig:
    """The configuration of the drafter in `folder`. Raises ConfigError."""
    root = Section(read_json(Path(folder) / "config.json"), f"{folder}: config.json")
    kind = root.values.get("speculators_model_type")
    named = [str(name) for name in root.items("architectures", ())]
    if kind is None and not any(name in CLASSES for name in named):
        got = ", ".join(named) or "no architecture"
        raise ConfigError(f"{FLAG}: {root.path} names {got}; drafters are EAGLE-3 heads ({', '.join(CLASSES)})")
    if kind not in (None, "eagle3"):
        raise ConfigError(f"{FLAG}: {root.path}: speculators_model_type={kind!r} is not supported; supported is eagle3")
    if root.values.get("quantization_config") is not None:
        raise ConfigError(f"{FLAG}: {root.path}: quantized drafters are not supported; name one with float weights")
    check_target(target)
    check_tokenizer(Path(folder), Path(target.folder))
    return _read(root, target, folder, root if kind is None else root.section("transformer_layer_config"))


def _read(root: Section, target: ModelConfig, folder: str, body: Section) -> DrafterConfig:
    values = {**(root.values.get("eagle_config") or {}), **root.values}
    options = Section({key: value for key, value in values.items() if value is not None}, root.path)
    if body.values.get("model_type", "llama") != "llama":
        raise ConfigError(f"{body.path}: model_type={body.values['model_type']!r} of a drafter; supported is 'llama'")
    if options.boolean("parallel_drafting", False):
        raise ConfigError(f"{FLAG}: {root.path}: parallel drafting is not supported")
    windowed = SLIDING in body.items("layer_types", ())
    text = read_text(body, root, sliding="layers" if windowed else "none")
    if len({layer.rope for layer in text.layers}) > 1:
        raise ConfigError(f"{FLAG}: {body.path}: layers with different rotary positions in a drafter are not supported")
    if text.vocab_size != target.text.vocab_size:
        raise ConfigError(
            f"{FLAG}: {body.path}: vocab_size={text.vocab_size}, but the target has {target.text.vocab_size} tokens; "
            "name a drafter that was made for this model"
        )
    joins = options.boolean("use_aux_hidden_state", True)
    width = options.size("target_hidden_size", text.hidden_size)
    if width != target.text.hidden_size:
        raise ConfigError(
            f"{FLAG}: {root.path}: the drafter reads hidden states of {width} numbers; the target makes "
            f"{target.text.hidden_size}; name a drafter that was made for this model"
        )
    if not joins and text.hidden_size != width:
        raise ConfigError(
            f"{FLAG}: {root.path}: use_aux_hidden_state=false with hidden_size={text.hidden_size}: without fc the "
            f"drafter reads hidden states of {width} numbers as they are; both sizes must be equal"
        )
    text = replace(text, tie_embeddings=False)
    return DrafterConfig(
        folder=folder,
        text=text,
        vocab_size=options.size("draft_vocab_size", text.vocab_size),
        streams=_streams(options, len(target.text.layers)) if joins else (len(target.text.layers),),
        stream_width=width,
        norm_before_residual=options.boolean("norm_before_residual", False),
        norm_before_fc=joins and options.boolean("norm_before_fc", False),
        fc_norm=joins and options.boolean("fc_norm", False),
        norm_output=options.boolean("norm_output", False),
        torch_dtype=saved_dtype(root.values, body.values),
        num_tokens=_num_tokens(root),
        names_streams=not joins or any(options.values.get(key) for key in IDS),
        joins_streams=joins,
    )


def check_target(target: ModelConfig) -> None:
    """Raises ConfigError if the target cannot hand out its streams."""
    if target.implementation == "transformers":
        raise ConfigError(
            f"{FLAG}: {target.architecture} runs through transformers, and drafters read the streams of our own "
            "decoders; leave the flag out, or use method ngram"
        )


def check_tokenizer(drafter: Path, target: Path) -> bool:
    """Whether both folders have a tokenizer.json with the same vocabulary. Raises ConfigError if the vocabularies
    differ."""
    vocabularies = [_vocabulary(folder / "tokenizer.json") for folder in (drafter, target)]
    if None in vocabularies:
        return False
    if vocabularies[0] != vocabularies[1]:
        raise ConfigError(
            f"{FLAG}: {drafter / 'tokenizer.json'} has another vocabulary than the target's "
            f"{target / 'tokenizer.json'}; drafts are token ids of the target: name a drafter with the same tokenizer"
        )
    return True


def _vocabulary(path: Path) -> Any:
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_bytes())["model"]["vocab"]
    except (ValueError, KeyError, TypeError):
        return None


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


def _num_tokens(root: Section) -> int:
    """How many drafts the file proposes; 0: it does not say."""
    settings = root.values.get("speculators_config") or {}
    for method in settings.get("proposal_methods") or ():
        count = method.get("speculative_tokens")
        if isinstance(count, int) and 1 <= count <= MOST_DRAFTS:
            return count
    return 0
