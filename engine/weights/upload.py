"""Upload: copies bytes from pinned host memory to an accelerator, on a separate stream.

Thread: several readers send, the thread that builds the model does the rest. A copy reads its source when it runs, not
when it is launched, so a pinned chunk may be rewritten only after the event of its copies has fired.

    reader      read chunk into pinned | send, event | wait for the event of 3 chunks ago | read ...
    copy stream                              copies ...... event
    compute                                                | arrive(event) -> the part is packed
"""

from __future__ import annotations

import torch
from torch import Tensor


class Upload:
    """The copy stream of one accelerator."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._stream = torch.cuda.Stream(self._device)

    def pinned(self, size: int) -> Tensor:
        """Host memory [size] uint8 that the device reads directly."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def begin(self) -> None:
        """Lets copies sent from now on write memory that was allocated on the current stream before."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def send(self, copies: list[tuple[Tensor, Tensor]]) -> torch.cuda.Event:
        """Copies (target, pinned source) pairs of uint8 in order; returns the event that fires after all copies."""
        event = torch.cuda.Event(blocking=True)
        with torch.cuda.stream(self._stream):
            for target, source in copies:
                target.copy_(source, non_blocking=True)
            event.record(self._stream)
        return event

    def arrive(self, event: torch.cuda.Event) -> None:
        """Makes work launched on the current stream from now on wait for the copies of `event`."""
        torch.cuda.current_stream(self._device).wait_event(event)

    def finish(self) -> None:
        """Waits for all work on the device, so that any stream may read the weights; frees pinned memory."""
        torch.cuda.synchronize(self._device)
        torch._C._host_emptyCache()


def upload_for(device: str) -> Upload | None:
    """The Upload; None on a CPU, where weights are read through a memory map."""
    return None if torch.device(device).type == "cpu" else Upload(device)
