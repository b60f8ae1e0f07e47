"""Live requests as admission, scheduler and parts know them: a choice in its slot, and its names in the prefix cache.

Owner: device thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from engine.base.request import Request


@dataclass(slots=True)
class Place:
    """How the scheduler and the prefix cache know a request. Made by admission, completed by parts."""

    root: bytes  # 16 bytes: requests share cached prefixes only where it is equal
    adapter: int = 0  # the number of the request's adapter; 0: none
    keys: np.ndarray | None = None  # int64 [2, tokens]: what names each token in the prefix cache; None: its id
    media: np.ndarray | None = None  # int32 [m, 4]: runs of the prompt that media take
    traced: bool = False  # the row computes its last token too, and says how long it is when its slot comes back
    reads_cache: bool = True  # cached blocks may stand for the request's first tokens
    made: list[int] = field(default_factory=list)  # entries of media that no earlier request named


@dataclass(slots=True)
class LiveRow:
    """One choice that has a slot. Made by admission."""

    device_id: int  # the engine's number of the choice
    choice: int  # of its request, from 0
    request: Request
    seed: int
    place: Place
    again: bool = False  # it has started over once, because a step did not fit into the device's memory
    started: float = 0.0  # when its first step began, on the clock of time.monotonic
