from typing import Any

class SeqTable:
    num_slots: int
    num_used: int
    restarting: Any
    def __init__(self, num_slots: int) -> None: ...
    def snapshot(self, slot: int) -> dict[str, int | float | bool]: ...
