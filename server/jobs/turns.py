"""Finds the starts of turns in the tokens of a rendered conversation: hints for the prefix cache.

Thread: the loop. In: token ids of a whole prompt. Out: at most MOST lengths of prefixes after which other requests may
continue differently. The engine stores states of recurrent layers at these lengths (Request.boundaries); keys and
values need no hint.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

MOST = 8


def turn_starts(ids: np.ndarray, is_special: Callable[[int], bool]) -> tuple[int, ...]:
    """Returns starts of turns, ascending, without 0; () if no turn is found.

    A turn begins with the special token that is the prompt's first or second token and occurs again. The result has the
    start of the second turn, which follows the system text and the tools, and the newest of the other starts.
    """
    marks = [token for token in ids[:2].tolist() if is_special(token)]
    starts = np.flatnonzero(ids == marks[-1]).tolist()[1:] if marks else []
    return tuple(starts[:1] + starts[1:][-(MOST - 1) :])
