"""Where the turns of a rendered conversation begin, as its tokens say it: a hint for the prefix cache.

Thread: the loop. In: token ids of a whole prompt. Out: at most MOST lengths of the prompt behind which other requests
may go on differently. The engine stores states of recurrent layers there (Request.boundaries); keys and values need no
hint.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

MOST = 8


def turn_starts(ids: np.ndarray, is_special: Callable[[int], bool]) -> tuple[int, ...]:
    """Ascending, without 0; () where no turn is found.

    Turns begin with the special token that is the prompt's first or second and comes again. The second turn counts,
    before which the system text and the tools stand, and of the others the newest.
    """
    for token in ids[:2].tolist():
        if not is_special(token):
            continue
        starts = np.flatnonzero(ids == token).tolist()
        if len(starts) > 1:
            return tuple(starts[1:2] + starts[2:][-(MOST - 1) :])
    return ()
