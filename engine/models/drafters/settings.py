"""Which drafter the operator requests: reads the configuration of a drafter's folder, whatever its kind.

    flat         an architecture that names the kind, the decoder's keys at the top, some in an object of the kind
    speculators  `speculators_model_type`, the decoder's keys in `transformer_layer_config`

In: the engine's settings, and the target's ModelConfig. Out: the drafts, with a DrafterConfig if a folder has the
drafter. ConfigError names the key that does not fit. Thread: any.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

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
    REPLAY,
    SUFFIX,
    DraftConfig,
    check_keys,
    draft_config,
)
from engine.base.errors import ConfigError
from engine.base.model_config import ModelConfig
from engine.checkpoint.files import read_json
from engine.checkpoint.section import Section
from engine.models.drafters import dflash2_settings, dflash_settings, dspark_settings, eagle_settings
from engine.models.drafters.drafter_config import DrafterConfig, Files
from engine.models.drafters.fit import check_target, check_tokenizer
from engine.models.drafters.mtp import check_mtp
from engine.models.registry import MODALITIES, load_model_config

READERS: dict[str, tuple[tuple[str, ...], Callable[[Files, ModelConfig], DrafterConfig]]] = {
    "eagle3": (eagle_settings.CLASSES, eagle_settings.read),
    "peagle": ((), eagle_settings.read),
    "dflash": (dflash_settings.CLASSES, dflash_settings.read),
    "dflash2": (dflash2_settings.CLASSES, dflash2_settings.read),
    "dspark": (dspark_settings.CLASSES, dspark_settings.read),
}


def drafts_of(config: EngineConfig, target: ModelConfig) -> tuple[DraftConfig, DrafterConfig | None] | None:
    """The drafts that the operator requests, with their drafter, if any; None: no drafts. Raises ConfigError."""
    drafts = draft_config(config.speculative)
    if drafts is None or drafts.method in (NGRAM, SUFFIX, REPLAY):
        return None if drafts is None else (drafts, None)
    if drafts.method == DRAFT_MODEL or (drafts.method == BY_FILES and is_whole(drafts.model)):
        return draft_model_of(config, drafts, target), None
    check_keys(config.speculative, drafts.method or EAGLE3)
    if drafts.method == MTP:
        check_target(target)
        check_mtp(target)
        return drafts, None
    drafter = read_drafter(drafts.model, target)
    number = drafts.num_tokens or drafter.num_tokens
    if not number:
        raise ConfigError(f"{FLAG}: num_speculative_tokens is missing; give a whole number from 1 to {MOST_DRAFTS}")
    if number > drafter.most_tokens:
        raise ConfigError(
            f"{FLAG}: num_speculative_tokens is {number}, but {drafts.model} guesses blocks of at most "
            f"{drafter.most_tokens} drafts; lower it"
        )
    return replace(drafts, num_tokens=number, method=drafts.method or EAGLE3), drafter


def is_whole(folder: str) -> bool:
    """Whether a folder holds a model with layers, embedding and head of its own, rather than a head over a target."""
    root = config_of(folder)
    heads = {name for names, _ in READERS.values() for name in names}
    return "speculators_model_type" not in root.values and not heads & set(root.items("architectures", ()))


def config_of(folder: str) -> Section:
    """The config.json of a drafter's folder. Raises ConfigError."""
    return Section(read_json(Path(folder) / "config.json"), f"{folder}: config.json")


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
    root = config_of(folder)
    kind = root.values.get("speculators_model_type")
    named = [str(name) for name in root.items("architectures", ())]
    if kind is None:
        kind = next((kind for kind, (classes, _) in READERS.items() if set(classes) & set(named)), None)
        if kind is None:
            got, known = (
                ", ".join(named) or "no architecture",
                [name for names, _ in READERS.values() for name in names],
            )
            raise ConfigError(f"{FLAG}: {root.path} names {got}; drafters are {', '.join(known)}")
        files = Files(folder, root, root)
    elif isinstance(kind, str) and kind in READERS:
        files = Files(folder, root, root.section("transformer_layer_config"))
    else:
        raise ConfigError(
            f"{FLAG}: {root.path}: speculators_model_type={kind!r} is not supported; supported are {', '.join(READERS)}"
        )
    if root.values.get("quantization_config") is not None:
        raise ConfigError(f"{FLAG}: {root.path}: quantized drafters are not supported; name one with float weights")
    check_target(target)
    check_tokenizer(Path(folder), Path(target.folder))
    return READERS[kind][1](files, target)
