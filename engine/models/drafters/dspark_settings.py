"""Reads the configuration of a DSpark drafter: DFlash's, and that of its two heads.

    flat         `architectures: [Qwen3DSparkModel]`, DFlash's keys and the heads' at the top or in `dflash_config`
    speculators  `speculators_model_type: dspark`

Formats: the files of deepseek-ai/DeepSpec and vllm-project/speculators, and vLLM's reader of them. Thread: any.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.base.drafts import FLAG
from engine.base.errors import ConfigError
from engine.base.model_config import ModelConfig
from engine.checkpoint.text import refuse
from engine.models.drafters.dflash_settings import BEHIND, BlockConfig, common
from engine.models.drafters.drafter_config import Files
from engine.models.drafters.markov import TYPES

CLASSES = ("Qwen3DSparkModel", "DSparkDraftModel", "DSparkSpeculator")
OTHER_NAMES = {"dspark_target_layer_ids": BEHIND}
RANK, USUAL = 256, "vanilla"  # of files that do not say


@dataclass(frozen=True, slots=True, kw_only=True)
class DSparkConfig(BlockConfig):
    """A block drafter with a head for what follows a token, and a head for how often drafts are right."""

    rank: int  # numbers that the heads know of the token before; 0: drafts do not depend on it
    markov_type: str  # see engine/models/drafters/markov
    confident: bool
    confident_of_token: bool  # the confidence depends on the token before


def read(files: Files, target: ModelConfig) -> DSparkConfig:
    """The configuration of a drafter. Raises ConfigError."""
    options = files.options("dflash_config").renamed(OTHER_NAMES)
    full = "speculators_model_type" in options.values  # these files leave defaults out
    refuse(options, projector_type="dspark", dspark_draft_topk=0)
    rank, known = options.integer("markov_rank", RANK), list(TYPES)
    markov_type = options.values.get("markov_head_type", USUAL)
    if markov_type not in known:
        raise ConfigError(
            f"{FLAG}: {options.path}: markov_head_type={markov_type!r} is not supported; supported are {known}"
        )
    confident = options.boolean("enable_confidence_head", full)
    of_token = confident and options.boolean("confidence_head_with_markov", full)
    if of_token and not rank:
        raise ConfigError(
            f"{FLAG}: {options.path}: confidence_head_with_markov=true needs markov_rank above 0, got 0; the files are "
            "not those of a trained drafter"
        )
    skipped = int(not options.boolean("sample_from_anchor", True))
    fields = common(files, options, target, skipped)
    return DSparkConfig(**fields, rank=rank, markov_type=markov_type, confident=confident, confident_of_token=of_token)
