from _fast.turns import Turns

class WaitQueue:
    size: int
    by_priority: bool
    num_expired: int
    turns: Turns
    def __init__(self, num_slots: int, by_priority: bool = False, looks_past: bool = False) -> None: ...
    def add(
        self,
        slot: int,
        priority: int = 0,
        arrival: float = 0.0,
        order: int = 0,
        again: bool = False,
        *,
        flow: int = 0,
        weight: int = 1,
        cost: int = 0,
        deadline: float = ...,
    ) -> None: ...
    def discard(self, slot: int) -> bool: ...
    def start(self, slot: int, generated: int = 0) -> None: ...
    def expire(self, at: float) -> None: ...
    def take_expired(self) -> list[int]: ...
    def peek(self) -> int: ...
