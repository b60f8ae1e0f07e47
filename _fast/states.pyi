from typing import Any

NONE: int
ALIGN: int
ALL: int

class StateRuns:
    active: bool
    chunk: int
    unit: int
    def scan_in(self, variant: int) -> None: ...
    def row(self, slot: int) -> dict[str, Any]: ...
    @property
    def counts(self) -> dict[str, int]: ...
