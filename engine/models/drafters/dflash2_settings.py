"""Reads the configuration of a DFlash2 drafter: DFlash's, and that of its convolutions and of its selector.

    flat         `architectures: [DFlash2DraftModel]`, the keys at the top or in `dflash_config`
    speculators  `speculators_model_type: dflash2`, whose sliding layers see their whole block

Formats: the files of z-lab and vllm-project/speculators. Thread: any.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.base.drafts import FLAG
from engine.base.errors import ConfigError
from engine.base.model_config import ModelConfig
from engine.checkpoint.section import Section
from engine.checkpoint.text import refuse
from engine.models.drafters.dflash_settings import BlockConfig, common
from engine.models.drafters.drafter_config import Files

CLASSES = ("DFlash2DraftModel",)


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlash2Config(BlockConfig):
    """A block drafter with convolutions inside the block and a selector of candidates."""

    taps: int
    group: int  # columns with the same change of the kernel
    rank: int  # of the selector
    candidates: int


def read(files: Files, target: ModelConfig) -> DFlash2Config:
    """The configuration of a drafter. Raises ConfigError."""
    options = files.options("dflash_config")
    if "speculators_model_type" in options.values:
        options = Section({"sliding_window_non_causal": True, **options.values}, options.path)
    refuse(options, projector_type="dflash2", sample_from_anchor=False)
    fields = common(files, options, target, skipped=1)
    text = fields["text"]
    if fields["vocab_size"] != text.vocab_size:
        raise ConfigError(
            f"{FLAG}: {options.path}: draft_vocab_size={fields['vocab_size']}: the selector of DFlash2 counts the "
            f"target's {text.vocab_size} tokens; name a drafter with the whole vocabulary"
        )
    group = options.size("conv_group_size")
    if text.hidden_size % group:
        raise ConfigError(
            f"{FLAG}: {options.path}: conv_group_size={group} must divide hidden_size={text.hidden_size}; the "
            "files are not those of a trained drafter"
        )
    return DFlash2Config(
        **fields,
        taps=options.integer("conv_kernel_size", least=1, most=fields["block_size"]),
        group=group,
        rank=options.size("selector_rank"),
        candidates=options.integer("selector_top_k", least=1, most=text.vocab_size),
    )
