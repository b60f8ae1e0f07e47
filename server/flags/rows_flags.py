"""RowsFlags: whether requests may send embeddings in place of text and of media; a group of Config."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RowsFlags:
    """Flags for embeddings in requests, off by default: embeddings bypass every check of texts and pictures."""

    enable_prompt_embeds: bool = field(
        default=False, metadata={"help": "let requests send prompt_embeds instead of text"}
    )
    enable_mm_embeds: bool = field(
        default=False,
        metadata={"help": "let requests send image_embeds, audio_embeds and video_embeds instead of media"},
    )
