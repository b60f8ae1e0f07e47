"""WhisperTokens: the marker tokens of one Whisper checkpoint, and the tokens that are suppressed in its texts.

Owner: none, a frozen value, made once at start (pool). In: the tokenizer and generation_config.json.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server.render.tokenizer import Tokenizer

SMOOTH = 7  # rows of the median filter, if config.json gives none


@dataclass(frozen=True, slots=True)
class WhisperTokens:
    """The markers of one checkpoint, and its suppressed tokens."""

    first_marker: int  # ids from here on are no text; this one ends texts
    start: int
    previous: int | None
    no_speech: int
    no_timestamps: int
    transcribe: int | None  # None: the model only transcribes English and has no tasks
    translate: int | None
    languages: dict[str, int]  # by code
    suppressed: tuple[int, ...]
    not_first: tuple[int, ...]
    latest_start: int  # the largest first timestamp of a window, in steps
    alignment_heads: tuple[tuple[int, int], ...]  # (layer, head) whose attention is aligned with the sound
    median_width: int  # rows over which attention weights are smoothed

    @property
    def first_time(self) -> int:
        """The token of 0.00 seconds; the tokens of later times follow it."""
        return self.no_timestamps + 1

    @classmethod
    def of(cls, tokenizer: Tokenizer, folder: str, raw: dict[str, Any], known: Iterable[str]) -> WhisperTokens:
        """Find the tokens of a checkpoint and of the `known` languages. ValueError if a marker is missing."""

        def marker(*names: str) -> int:
            found = maybe(*names)
            if found is None:
                raise ValueError(f"the tokenizer has no {names[0]}, which Whisper's prompts need")
            return found

        def maybe(*names: str) -> int | None:
            return next((found for name in names if (found := tokenizer.id_of(name)) is not None), None)

        path = Path(folder) / "generation_config.json"
        generation = {**raw, **(json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {})}
        languages = {code: found for code in known if (found := maybe(f"<|{code}|>")) is not None}
        multilingual = bool(generation.get("is_multilingual", len(languages) > 1))
        return cls(
            first_marker=marker("<|endoftext|>"),
            start=marker("<|startoftranscript|>"),
            previous=maybe("<|startofprev|>"),
            no_speech=marker("<|nospeech|>", "<|nocaptions|>"),
            no_timestamps=marker("<|notimestamps|>"),
            transcribe=marker("<|transcribe|>") if multilingual else None,
            translate=marker("<|translate|>") if multilingual else None,
            languages=languages if multilingual else {},
            suppressed=tuple(generation.get("suppress_tokens") or ()),
            not_first=tuple(generation.get("begin_suppress_tokens") or ()),
            latest_start=int(generation.get("max_initial_timestamp_index") or 1 << 20),
            alignment_heads=tuple((int(layer), int(head)) for layer, head in generation.get("alignment_heads") or ())
            or upper_heads(raw),
            median_width=int(raw.get("median_filter_width") or SMOOTH),
        )


def upper_heads(raw: dict[str, Any]) -> tuple[tuple[int, int], ...]:
    """The alignment heads if no file names them: all heads of the decoder's upper half, as in OpenAI's code."""
    layers, heads = int(raw["decoder_layers"]), int(raw["decoder_attention_heads"])
    return tuple((layer, head) for layer in range(layers // 2, layers) for head in range(heads))
