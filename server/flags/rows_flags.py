"""RowsFlags: whether requests may bring embeddings in the place of text and of media; a group of Config."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RowsFlags:
    """Off: whoever chooses what a model reads below its tokens passes by every check of texts and pictures."""

    enable_prompt_embeds: bool = field(
        default=False, metadata={"help": "let requests bring prompt_embeds: rows in the place of text"}
    )
    enable_mm_embeds: bool = field(
        default=False, metadata={"help": "let chat bring image_embeds: rows in the place of pictures"}
    )
