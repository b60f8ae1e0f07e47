"""AcceptanceWatch: a warning if few drafts are right, because then drafts cost time and save none.

Owner: device thread, while it settles steps. In: counts of drafts since start. Out: one line of the log. A drafter that
was read wrongly, or that belongs to another model, changes no answer; only its acceptance shows the mistake.
"""

from __future__ import annotations

import logging

from engine.base.stats import DraftCounts

log = logging.getLogger("omniloop.engine")

DRAFTS = 1000  # rows of steps with drafts after which their acceptance is looked at
LEAST = 0.2  # share of first drafts that should be right


class AcceptanceWatch:
    """Compares the counts of every DRAFTS rows, and warns once."""

    __slots__ = ("_last", "_warned")

    def __init__(self) -> None:
        self._last, self._warned = DraftCounts(), False

    def look(self, counts: DraftCounts) -> None:
        """`counts`: since start; call at every step with drafts, or less often."""
        drafts = counts.drafts - self._last.drafts
        if self._warned or drafts < DRAFTS:
            return
        right = sum(counts.accepted_per_place[:1]) - sum(self._last.accepted_per_place[:1])
        self._last = counts
        if right < LEAST * drafts:
            self._warned = True
            log.warning(
                "speculative decoding: the first draft was right in %.1f %% of %d verified rows; below %.0f %% drafts"
                " may cost more than they save. Leave out --speculative-config for such texts, or use a drafter"
                " that was trained for this model",
                100 * right / drafts,
                drafts,
                100 * LEAST,
            )
