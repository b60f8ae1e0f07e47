"""Count the signals that arrive before the loop runs, so that none is lost and none ends in a traceback.

Owner: main thread. Python answers SIGINT with an exception wherever the main thread happens to be; raised inside the
import of an extension module it can vanish, and the server would start despite a request to stop. Signals are therefore
counted here from the first line of `python -m server`; process.py takes the count after it installs its own handlers.

    hold -- imports, flags, bind -- loop's handlers -- taken() -- on_signal as often
"""

from __future__ import annotations

import signal
import sys
from types import FrameType

STOPPING = (signal.SIGINT, signal.SIGTERM)
_count = 0


def hold() -> None:
    """Hold signals from now on, until `taken`."""
    for number in STOPPING:
        signal.signal(number, _note)


def _note(number: int, frame: FrameType | None) -> None:
    global _count
    _count += 1


def taken() -> int:
    """The number of signals since `hold` or the last call."""
    global _count
    count, _count = _count, 0
    return count


def release() -> None:
    """Restore Python's own handlers, for commands that are no servers; a signal received meanwhile ends the process."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if taken():
        sys.exit(128 + signal.SIGTERM)
