"""Where decoders meet planted faults (engine/base/faults); nothing of it is reached without --debug-faults.

Owner: threads of the pool. In: what is armed. Out: a decoder that raises or hangs, or processes that decode and end.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from engine.base.faults import Faults

if TYPE_CHECKING:
    from mm.load import MediaLoader


def into_decoders(media: MediaLoader, faults: Faults) -> None:
    """Each decoder that begins asks first."""

    def begins() -> None:
        for pid in media.helpers.pids() if faults.takes("decoder", "crash") else ():
            os.kill(pid, signal.SIGSEGV)
        faults.at("decoder")

    media.planted = begins
