"""The drafts of an answer, as its field `metrics`: how many were verified, and how many were right.

Owner: loop. In: for each step, the drafts of an answer's only choice. Out: `metrics.speculative_decoding`, with vLLM's
names; null for an answer of several choices or prompts, or without drafts. The level of
--per-request-spec-decode-metrics says how much is reported.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

Level = Literal["none", "summary", "detailed"]  # of --per-request-spec-decode-metrics


class DraftedSteps:
    """The steps that verified drafts of one choice."""

    __slots__ = ("_counts", "_in_order")

    def __init__(self, detailed: bool) -> None:
        """`detailed`: also in their order."""
        self._counts: Counter[tuple[int, int]] = Counter()  # (drafts, right drafts) -> steps
        self._in_order: list[tuple[int, int]] | None = [] if detailed else None

    def add(self, drafts: int, accepted: int) -> None:
        """See TokenStream.drafted."""
        self._counts[drafts, accepted] += 1
        if self._in_order is not None:
            self._in_order.append((drafts, accepted))

    def body(self, most: int) -> dict[str, Any] | None:
        """The JSON object, None before the first step; `most`: the most drafts of a step."""
        steps = self._counts.total()
        if not steps:
            return None
        drafts = sum(number * count for (number, _), count in self._counts.items())
        accepted = sum(number * count for (_, number), count in self._counts.items())
        by_length: dict[str, list[int]] = {}
        for length in sorted({number for number, _ in self._counts}):
            by_length[str(length)] = [self._counts[length, right] for right in range(length + 1)]
        found: dict[str, Any] = {
            "mean_acceptance_length": 1 + accepted / steps,
            "draft_acceptance_rate": accepted / drafts,
            "acceptance_histogram": [
                sum(self._counts[length, right] for length in range(right, most + 1)) for right in range(most + 1)
            ],
            "acceptance_histogram_by_draft_length": by_length,
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafts,
            "num_spec_tokens": most,
        }
        if self._in_order is not None:
            found["per_step_accepted"] = [accepted for _, accepted in self._in_order]
            found["per_step_drafted"] = [drafts for drafts, _ in self._in_order]
        return found


def metrics_of(level: Level, steps: DraftedSteps | None, most: int) -> dict[str, Any]:
    """`metrics`, for the object that also has `usage`; {} if the server does not report it."""
    if level == "none":
        return {}
    return {"metrics": {"speculative_decoding": None if steps is None else steps.body(most)}}
