"""Signals that come before the loop runs: counted, so that they are neither lost nor a traceback.

Owner: main thread. Python answers SIGINT with an exception wherever the main thread happens to be; raised inside the
import of an extension module it can vanish, and the server would start in spite of a request to stop. From the
first line of `python -m server` the signals are counted here; process.py takes the count once its own handlers stand.

    hold -- imports, flags, bind -- loop's handlers -- taken() -- on_signal as often
"""

from __future__ import annotations

import signal
import sys
from types import FrameType

STOPPING = (signal.SIGINT, signal.SIGTERM)
_count = 0


def hold() -> None:
    """From now on the signals wait for `taken`."""
    for number in STOPPING:
        signal.signal(number, _note)


def _note(number: int, frame: FrameType | None) -> None:
    global _count
    _count += 1


def taken() -> int:
    """How many have come since `hold` or the last call."""
    global _count
    count, _count = _count, 0
    return count


def release() -> None:
    """Back to Python's own answers, for commands that are no servers; what has come meanwhile ends the process."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if taken():
        sys.exit(128 + signal.SIGTERM)
