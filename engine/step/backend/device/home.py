"""Home: the pinned ring in which a step's tokens arrive. TokensHome: the event that fires on their arrival.

Owner: device thread. The last kernel of a step writes its tokens, by plan row, into the ring's line with the number of
the step's record. Parts can allocate similar rings (`lines`); a line is used again together with its record.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor

from _fast.clock import FOUND_DONE
from _fast.launcher import Launcher
from _fast.layout import TokenCode
from engine.device.accelerator import Accelerator
from engine.kernels.sampling.drafts_home import UNREAD, send_drafts
from engine.kernels.sampling.home import send_home
from engine.kernels.step_tensors import SlotTensors, StepInputs

POLL = 2e-5  # seconds between two looks at the drafts of a step
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
    """The pinned rings on the host, of tokens and of drafts, and the device buffer of tokens that is copied there."""

    def __init__(self, accelerator: Accelerator, rows: int, width: int, first: Home | None = None) -> None:
        """`first`: of rank 0, whose tokens every rank gets; None: this is rank 0."""
        self._accelerator, self._rows = accelerator, rows
        self.ring: Tensor = self.lines(width) if first is None else first.ring
        # A run has places for a token, its row's drafts, and an end.
        self._drafts = self.lines(width - 1) if first is None and width > 1 else None
        end = int(TokenCode.END)
        self.runs = torch.full((rows, width), end, dtype=torch.int32, device=accelerator.device)
        self.tokens = self.runs.view(-1)  # [rows * width]

    def lines(self, words: int) -> Tensor:
        """Allocates a pinned ring, int32 [RECORDS, max_rows, words], for results that arrive with a step's tokens."""
        return self._accelerator.pinned(RECORDS * self._rows * words).view(RECORDS, self._rows, words)

    def await_drafts(self, record: int) -> None:
        """Before the forward of a step is launched whose drafts the host reads."""
        assert self._drafts is not None, "the server has drafts"
        self._drafts[record].fill_(UNREAD)

    def send_drafts(self, inputs: StepInputs, slots: SlotTensors) -> None:
        """Launches the kernel that writes the drafts of a step into its line, if the server has drafts."""
        if self._drafts is not None and inputs.row_drafts is not None:
            send_drafts(self._drafts, inputs.home, inputs.row_drafts, inputs.row_slot, slots)

    def drafts_of(self, record: int, rows: np.ndarray, timeout: float) -> np.ndarray:
        """The drafts of plan rows, int32 [rows, 1 + K]; see Backend. Waits at most `timeout` seconds."""
        assert self._drafts is not None, "the server has drafts"
        line, until = self._drafts[record].numpy(), time.perf_counter() + timeout
        while (found := line[rows]).size and found.min() == UNREAD:
            if time.perf_counter() > until:
                raise RuntimeError(f"the drafts of a step have not arrived in {timeout:g} s")
            time.sleep(POLL)
        return found

    def send(self, inputs: StepInputs, slots: SlotTensors, drafting: bool) -> None:
        """Launches the kernel that writes the sampled tokens into the step's line of the ring."""
        drafts = inputs.row_drafts if drafting else None
        send_home(self.ring, self.runs, inputs.home, inputs.row_slot, slots, drafts)
