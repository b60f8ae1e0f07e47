"""Patience: a timer that fires too late says that this process stood still, not that its client was slow.

Owner: loop. After a suspended machine, a stopped process or a long turn of the loop, timers fire before the sockets are
read: a client whose request has lain there all the time would be closed without an answer. It gets a moment more, in
which the loop reads what has come, and in which a client that stood still as well can go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LATE_S = 0.1  # the loop's turns are shorter, unless the process stands still
MOMENT_S = 1.0


def moment(timer: asyncio.TimerHandle | None, call: Callable[[], object]) -> asyncio.TimerHandle | None:
    """Another timer for `call`, if the one that fires now is late; None: it is not, and the client's time is over."""
    loop = asyncio.get_running_loop()
    if timer is None or loop.time() - timer.when() <= LATE_S:
        return None
    return loop.call_later(MOMENT_S, call)
