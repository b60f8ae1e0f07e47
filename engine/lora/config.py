"""AdapterConfig: the keys of PEFT's adapter_config.json that decide what an adapter computes.

In: the bytes of the file. Out: rank and scale of each module; AdapterError for a key that means more than A and B, or
whose training changed the base's weights. Thread: any. Source of keys and rules: PEFT 0.21 (`LoraConfig`,
`get_pattern_key`), https://huggingface.co/docs/peft/package_reference/lora.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.base.errors import AdapterError, ConfigError
from engine.checkpoint.section import Section
from engine.lora.patterns import Patterns

CONFIG = "adapter_config.json"
MAX_CONFIG_BYTES = 1 << 20
BASE_AS_IT_IS = (None, True, False, "gaussian", "eva", "orthogonal")  # values of init_lora_weights
MORE = {  # keys that mean more than A and B
    "use_dora": "DoRA scales the base's weights",
    "lora_bias": "the adapter has biases",
    "fan_in_fan_out": "the base's matrices are transposed",
    "layer_replication": "the adapter repeats layers of the base",
    "trainable_token_indices": "the adapter changes embeddings",
    "alora_invocation_tokens": "the adapter starts at tokens of the prompt",
    "use_qalora": "QA-LoRA pools the inputs",
    "use_bdlora": "the matrices are block-diagonal",
    "arrow_config": "the adapter routes to other adapters",
    "kasa_config": "the adapter changes the base's singular values",
    "monteclora_config": "the adapter samples its matrices",
}
READ = ("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights", "bias",
        "modules_to_save", "peft_version", "base_model_name_or_path")  # fmt: skip
# Keys of the training, or whose effect the tensors show.
WITHOUT_EFFECT = ("lora_dropout", "task_type", "inference_mode", "revision", "velora_config", "auto_mapping",
                  "target_modules", "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern",
                  "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size",
                  "runtime_config", "ensure_weight_tying")  # fmt: skip


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What an adapter's matrices mean."""

    rank: int
    alpha: float
    rank_stabilised: bool  # the scale is alpha / sqrt(rank) instead of alpha / rank
    ranks: Patterns
    alphas: Patterns
    saves_modules: bool
    version: tuple[int, int] | None  # of the PEFT that saved the file
    base: str  # the base's name at training
    identity: bytes  # canonical JSON of the keys that count

    def rank_of(self, module: str) -> int:
        """The rank of a module; `module`: its path in the model that was trained."""
        return int(self.ranks.value_of(module, self.rank))

    def scale_of(self, module: str) -> float:
        """The factor of B (A x)."""
        rank = self.rank_of(module)
        return self.alphas.value_of(module, self.alpha) / (rank**0.5 if self.rank_stabilised else rank)


def read_config(data: bytes) -> AdapterConfig:
    """Reads and checks the file's bytes."""
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{CONFIG} cannot be read as JSON: {error}") from None
    if not isinstance(values, dict):
        raise AdapterError(f"{CONFIG} must hold a JSON object, got {type(values).__name__}")
    try:
        return _read(Section(values, CONFIG))
    except ConfigError as error:
        raise AdapterError(str(error)) from None


def _read(section: Section) -> AdapterConfig:
    values = section.values
    _refuse(values)
    counts = {key: values.get(key) for key in ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")}
    version = re.match(r"(\d{1,4})\.(\d{1,4})", str(values.get("peft_version") or ""))
    parsed = None if version is None else (int(version[1]), int(version[2]))
    identity = json.dumps({**counts, "peft_version": parsed}, sort_keys=True, separators=(",", ":"))
    return AdapterConfig(
        rank=section.size("r", 8),
        alpha=section.number("lora_alpha", 8),
        rank_stabilised=section.boolean("use_rslora", False),
        ranks=_patterns(section, "rank_pattern", whole=True),
        alphas=_patterns(section, "alpha_pattern", whole=False),
        saves_modules=bool(values.get("modules_to_save")),
        version=parsed,
        base=str(values.get("base_model_name_or_path") or "")[:256],
        identity=identity.encode(),
    )


def _refuse(values: Mapping[str, Any]) -> None:
    """Raises AdapterError for the first key with an effect that this server does not compute."""
    if values.get("peft_type") != "LORA":
        raise AdapterError(f"{CONFIG}: peft_type={_short(values.get('peft_type'))}; only LORA is served")
    for key, why in MORE.items():
        if values.get(key):
            raise AdapterError(f"{CONFIG}: {key}={_short(values[key])}: {why}, which is not served; train without it")
    if values.get("bias", "none") not in (None, "none"):
        raise AdapterError(f"{CONFIG}: bias={_short(values['bias'])}: trained biases are not served; only none is")
    init = values.get("init_lora_weights")
    if not isinstance(init, bool | str | None) or init not in BASE_AS_IT_IS:
        raise AdapterError(
            f"{CONFIG}: init_lora_weights={_short(init)} changed the base's weights at training, so the adapter is "
            "wrong for this base; save it converted: save_pretrained(..., path_initial_model_for_weight_conversion=...)"
        )
    known = {*MORE, *READ, *WITHOUT_EFFECT}
    for key, value in values.items():
        if key not in known and value:
            raise AdapterError(
                f"{CONFIG}: {_short(key)}={_short(value)}: this key is not known here; remove it if it has no effect"
            )


def _patterns(section: Section, key: str, whole: bool) -> Patterns:
    """The patterns below `key`; `whole`: their values are ranks."""
    values = Section({}, CONFIG) if section.values.get(key) is None else section.section(key)
    return Patterns(f"{CONFIG}: {key}", values, whole)


def _short(value: object) -> str:
    """A value of the file for an error text."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
