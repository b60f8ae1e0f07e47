from collections.abc import Sequence
from typing import Any

from _fast.clock import StepClock
from _fast.launcher import Launcher
from _fast.params import SlotParams
from _fast.plan import StepPlan
from _fast.ring import OutputRing
from _fast.scheduler import Scheduler
from _fast.step_numbers import StepNumbers

REASON_INBOX: int
REASON_PYTHON: int
REASON_INVALID: int
REASON_RING: int
REASON_WOKEN: int
REASON_FREED: int
REASON_IDLE: int
REASON_PREEMPTED: int
SPECIAL_ALWAYS: int
SPECIAL_PROMPT: int
SPECIAL_WATCHED: int
SPECIAL_VARIANT_SHIFT: int

class SteadyLoop:
    in_flight: int
    planned: int
    uncommitted: int
    unpublished: int
    freed: bool
    last_beat: float
    num_steps: int
    free_s: float
    clock: StepClock
    def __init__(
        self,
        scheduler: Scheduler,
        plans: Sequence[StepPlan],
        params: SlotParams,
        launcher: Launcher,
        ring: OutputRing,
        special: Any,
        watched: Any,
        wake_fd: int,
    ) -> None: ...
    @property
    def numbers(self) -> StepNumbers: ...
    def run(self, in_flight: int) -> int: ...
    def is_plain(self, plan: StepPlan) -> bool: ...
    def plan_until(self, index: int) -> float: ...
    def learned(self) -> list[tuple[int, float]]: ...
