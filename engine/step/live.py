"""LiveRow: a choice of a request that has a slot. Place: the request's identity in scheduler and prefix cache.

Owner: device thread. Admission makes both; the executor and its parts read them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from engine.base.request import Request


@dataclass(slots=True)
class Place:
    """A request's identity in the scheduler and the prefix cache. Admission makes it, and parts complete it."""

    root: bytes  # 16 bytes: only requests with equal roots share cached prefixes
    adapter: int = 0  # the number of the request's adapter, or of its adapter's place; 0: none
    media_root: bytes = b""  # 16 bytes: only requests with equal roots share rows of media
    keys: np.ndarray | None = None  # int64 [2, tokens]: each token's key in the prefix cache; None: the ids
    media: np.ndarray | None = None  # int32 [m, 4]: the runs of the prompt that media occupy
    traced: bool = False  # True: the row also computes its last token, and reports its length when its slot is freed
    drafts: int = 0  # most drafts that a step verifies for the row
    last_place: int = 0  # most tokens of prompt and answer that steps compute; set when the scheduler has the request
    reads_cache: bool = True  # True: cached blocks may replace the computation of the request's first tokens
    made: list[int] = field(default_factory=list)  # media entries that this request was the first to use


@dataclass(slots=True)
class LiveRow:
    """One choice that has a slot; admission makes it."""

    device_id: int  # the engine's number of the choice
    choice: int  # index of the choice within its request, from 0
    request: Request
    seed: int
    place: Place
    again: bool = False  # the row has started over once, because a step did not fit into the device's memory
    started: float = 0.0  # start of the row's first step, in seconds of time.monotonic(); 0: not started
