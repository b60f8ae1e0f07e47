"""Patience: a timer that fires late shows that this process was stopped, not that its client was slow.

Owner: loop. After a suspended machine, a stopped process or a long turn of the loop, timers fire before sockets are
read: a client whose request is already in the socket would be disconnected without an answer. So the client gets one
more second, in which the loop reads its data, or in which a client that was stopped too can continue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LATE_S = 0.1  # turns of the loop are shorter, unless the process is stopped
MOMENT_S = 1.0


def moment(timer: asyncio.TimerHandle | None, call: Callable[[], object]) -> asyncio.TimerHandle | None:
    """Another timer for `call` if the timer that fires now is late; None if it is on time, so the client was
    too slow.
    """
    loop = asyncio.get_running_loop()
    if timer is None or loop.time() - timer.when() <= LATE_S:
        return None
    return loop.call_later(MOMENT_S, call)
