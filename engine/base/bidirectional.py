"""Bidirectional spans: which positions of a prompt one step computes together, and the last key that each token sees.

Thread: any; pure functions. In some models the tokens of an image or of a video frame see each other ("items"), in
others all tokens of the prompt, whatever a layer's window ("prompt"). A bidirectional span is a run of such positions.
The scheduler never cuts a chunk inside a span, so the cache holds the keys of all its tokens when attention reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np

from engine.base.request import Request

# Which tokens of a prompt attend to later tokens. "": none. "items": the tokens of one picture or frame attend to each
# other. "prompt": all tokens of the prompt attend to each other, whatever a layer's window.
Bidirectional = Literal["", "items", "prompt"]


def bi_spans_of(request: Request, bidirectional: Bidirectional) -> np.ndarray | None:
    """int32 [m, 2]: start and end of each bidirectional span, ascending; None: the prompt has none."""
    if bidirectional == "prompt":
        starts = np.array([0, len(request.prompt_token_ids)]) if request.pooling is None else request.pooling.starts
        return np.stack((starts[:-1], starts[1:]), 1).astype(np.int32)
    visible = [item for item in request.media if item.modality in ("image", "video")]
    if bidirectional == "items" and visible:
        spans = sorted((start, start + length) for item in visible for start, length in item.spans)
        return np.array(spans, np.int32)
    return None


def last_keys(
    slots: np.ndarray,
    lens: np.ndarray,
    computed: np.ndarray,
    bi_spans: Mapping[int, np.ndarray],
    bidirectional: Bidirectional,
) -> np.ndarray | None:
    """AttentionMeta.last_keys, int32 [num_tokens]; None: no row computes a bidirectional span. `bi_spans`: by slot."""
    found: np.ndarray | None = None
    starts = np.concatenate(([0], lens.cumsum()))
    for row, slot in enumerate(slots.tolist()):
        done, end = int(computed[row]), int(computed[row] + lens[row])
        for first, behind in bi_spans.get(slot, ()):
            low, high = max(int(first), done), min(int(behind), end)
            if low >= high:
                continue
            if found is None:
                found = np.repeat(computed - starts[:-1], lens) + np.arange(starts[-1])
            at = int(starts[row]) - done
            found[at + low : at + high] = ~(behind - 1) if bidirectional == "prompt" else behind - 1
    return None if found is None else found.astype(np.int32)
