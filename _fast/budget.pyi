from collections.abc import Iterable, Sequence
from typing import Any

from _fast.estimates import Estimates
from _fast.rest import Rest

class Budget:
    adaptive: bool
    rests: bool
    variant: int
    estimates: Estimates
    rest: Rest
    def __init__(self, num_slots: int, max_rows: int) -> None: ...
    def set_times(self, plain: Any, mixed: Any, choice: Any) -> None: ...
    def set_reading(self, seconds: float) -> None: ...
    def set_most(self, ranges: Iterable[Sequence[int]]) -> None: ...
    def let_rest(self, variant: int) -> None: ...
    def sized(
        self, survivals: Sequence[int], rows: int, tokens: int, most: int, decodes: bool, contexts: int = 0
    ) -> int: ...
