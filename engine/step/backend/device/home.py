"""Home: the pinned ring in which a step's tokens arrive. TokensHome: the event that fires on their arrival.

Owner: device thread. The last kernel of a step writes its tokens, by plan row, into the ring's line with the number of
the step's record. Parts can allocate similar rings (`lines`); a line is used again together with its record.
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

RECORDS = 3  # plans, used in turn: a record and its line are used again three steps later, after the step was settled


class TokensHome:
    """Fires when a step's tokens are in the pinned ring; fires at once if the step failed before its last launch."""

    __slots__ = ("_launcher", "_record", "asked", "fired_at", "found_done")

    def __init__(self, launcher: Launcher, record: int, asked: bool = False) -> None:
        self._launcher = launcher
        self._record = record
        self.asked = asked
        self.fired_at = 0.0
        self.found_done = False

    def wait(self, timeout: float) -> bool:
        """Blocks without the GIL; False after `timeout` seconds. The event loop watches this thread and notices a
        device that never answers."""
        begun = time.perf_counter()
        done = not self.asked or self._launcher.wait(self._record, timeout)
        self.fired_at = time.perf_counter()
        self.found_done = self.fired_at - begun < FOUND_DONE
        return done


class Home:
    """The pinned ring on the host, and the device buffer of tokens that is copied there."""

    def __init__(self, accelerator: Accelerator, rows: int, width: int, ring: Tensor | None = None) -> None:
        """`ring`: of rank 0, whose tokens every rank gets; None: this is rank 0."""
        self._accelerator, self._rows = accelerator, rows
        self.ring = self.lines(width) if ring is None else ring
        end = int(TokenCode.END)
        self.runs = torch.full((rows, width), end, dtype=torch.int32, device=accelerator.device)
        self.tokens = self.runs.view(-1)  # [rows * width]

    def lines(self, words: int) -> Tensor:
        """Allocates a pinned ring, int32 [RECORDS, max_rows, words], for results that arrive with a step's tokens."""
        return self._accelerator.pinned(RECORDS * self._rows * words).view(RECORDS, self._rows, words)

    def send(self, inputs: StepInputs, slots: SlotTensors, drafting: bool) -> None:
        """Launches the kernel that writes the sampled tokens into the step's line of the ring."""
        drafts = inputs.row_drafts if drafting else None
        send_home(self.ring, self.runs, inputs.home, inputs.row_slot, slots, drafts)
