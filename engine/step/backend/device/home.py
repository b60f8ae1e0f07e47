"""Home: the pinned ring in which a step's tokens arrive, and TokensHome, the event that says so.

Owner: device thread. The last kernel of a step writes its tokens, by plan row, into the line of the ring that has the
number of the step's record; parts get lines of their own (`lines`), which are used again with the record.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from _fast.clock import FOUND_DONE
from _fast.launcher import Launcher
from _fast.layout import TokenCode
from engine.device.accelerator import Accelerator
from engine.kernels.sampling.home import send_home
from engine.kernels.step_tensors import SlotTensors, StepInputs

RECORDS = 3  # plans in turn: a record and its line are used again three steps later, when the step has been settled


class TokensHome:
    """Fires when a step's tokens are in the pinned ring; at once when the step failed before it asked for them."""

    __slots__ = ("_launcher", "_record", "asked", "fired_at", "found_done")

    def __init__(self, launcher: Launcher, record: int, asked: bool = False) -> None:
        self._launcher = launcher
        self._record = record
        self.asked = asked
        self.fired_at = 0.0
        self.found_done = False

    def wait(self, timeout: float) -> bool:
        """Blocks without the GIL. A device that never answers is noticed by the loop, which watches this thread."""
        begun = time.perf_counter()
        done = not self.asked or self._launcher.wait(self._record, timeout)
        self.fired_at = time.perf_counter()
        self.found_done = self.fired_at - begun < FOUND_DONE
        return done


class Home:
    """Pinned lines on the host, and the runs of tokens on the device that are sent there."""

    def __init__(self, accelerator: Accelerator, rows: int, width: int) -> None:
        self._accelerator, self._rows = accelerator, rows
        self.ring = self.lines(width)
        end = int(TokenCode.END)
        self.runs = torch.full((width, rows), end, dtype=torch.int32, device=accelerator.device)
        self.tokens = self.runs[0]  # the first of each row's run

    def lines(self, words: int) -> Tensor:
        """int32 [RECORDS, max_rows, words], pinned: for what a part's kernels bring home with a step's tokens."""
        return self._accelerator.pinned(RECORDS * self._rows * words).view(RECORDS, self._rows, words)

    def send(self, inputs: StepInputs, slots: SlotTensors) -> None:
        """Launches what brings the chosen tokens into the step's line of the ring."""
        send_home(self.ring, self.runs, inputs.home, inputs.row_slot, slots)
