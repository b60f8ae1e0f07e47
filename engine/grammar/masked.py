"""Masked: the masks of one row in a step: for its next token, and for the token behind each of its drafts.

Owner: device thread. In: a row after the previous step's tokens, and the drafts that the step verifies. Out: its masks.
A draft that its mask does not allow is never chosen, so no later mask is read. Where a draft would change more than the
matcher's state, the mask behind it is zero, and the run ends there; the next step goes on with the settled row:

    the grammar ends, or begins        its row ends, or samples under another rule
    the grammar forces tokens          they join the answer before the next sample, as they do without drafts
    no token is left                   the row ends with the next step, for the reason that the step finds

The library computes the masks of a row whose state is only that of its matcher; copies of other rows are advanced here.
"""

from __future__ import annotations

import numpy as np

from engine.grammar.row import GrammarRow, take_ends


class Masked:
    """A row, the drafts that its step verifies, and those along which the library computes masks."""

    __slots__ = ("drafts", "known", "row")

    def __init__(self, row: GrammarRow, drafts: list[int]) -> None:
        self.row, self.drafts = row, drafts
        count = 0
        if row.is_steady:
            count = next((k for k, token in enumerate(drafts) if not 0 <= token < row.end), len(drafts))
        self.known = drafts[:count]

    def finish(
        self, words: np.ndarray, tails: np.ndarray, may_end: list[bool], allowed: np.ndarray | None, room: int
    ) -> None:
        """Completes the row's masks uint32 [1 + drafts, num_words] and their tails, in place.

        may_end: whether the library allowed the end; allowed: the mask of the request's other rules; room: tokens that
        the answer may still get.
        """
        row = self.row
        tails[0] = _finish(row, words[0], may_end[0], allowed)
        if row.redoes or row.verdict is not None:
            return
        if self.known:
            for behind in range(1, 1 + len(self.known)):
                row.finish_behind(words[behind], behind, may_end[behind], allowed)
            return
        probe = row.copy() if self.drafts else row
        for behind, token in enumerate(self.drafts, 1):
            waits = probe.is_waiting
            if token < 0 or probe.take(token) is not None or probe.over or waits != probe.is_waiting:
                return
            if probe.jump(room - behind - 1):
                return
            line, ends = words[behind], False
            if (matcher := probe.matcher) is not None:
                matcher.unsafe_compute_mask_ptr(line.ctypes.data, 4 * len(line))
                ends = take_ends(line[None], probe.end)[0]
            tails[behind] = _finish(probe, line, ends, allowed)
            if probe.verdict is not None:
                line.fill(0)
                return


def _finish(row: GrammarRow, line: np.ndarray, may_end: bool, allowed: np.ndarray | None) -> int:
    """Applies the request's other rules to a row's mask. Returns the mask of the ids beyond it."""
    if row.matcher is not None:
        if may_end or allowed is not None or row.may_open:
            row.finish(line, may_end, allowed)
    elif row.must_wake:
        row.wake(line)
    elif allowed is not None:
        line[:] = allowed
    else:
        line.fill(0xFFFF_FFFF)
        return -1
    return 0
