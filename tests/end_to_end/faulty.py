"""`python -m tests.end_to_end.faulty [flags]`: a server whose steps fail on certain prompts, for test_faults.

A prompt that begins with BREAKS_ITS_STEP makes its step raise. With LOSES_THE_DEVICE a kernel writes to unmapped
memory, which destroys a GPU's context; on a CPU the backend raises the error of a lost GPU. With NEVER_ENDS the step
never finishes: on a CPU its stream waits forever, on a GPU the launch does not return.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

from server.start import signals

signals.hold()  # as server/__main__ does, before the imports below

import torch  # noqa: E402

from engine.kernels.target import tl, triton  # noqa: E402
from engine.step.plain import Executor  # noqa: E402
from server import cli  # noqa: E402

BREAKS_ITS_STEP, LOSES_THE_DEVICE, NEVER_ENDS = 97, 98, 99


@triton.jit
def far_kernel(out, distance):
    """Writes one value at a 64-bit offset. Torch's own kernels check an index or truncate it to 32 bits."""
    tl.store(out + distance, 1.0)


def write_far_outside() -> None:
    """Launches a write terabytes after any allocation, and does not wait for it."""
    far_kernel[(1,)](torch.zeros(8, device="cuda"), 1 << 42)


def faulty(real: Any) -> Any:
    """Wraps an executor's launch_forward and adds the planted faults."""

    def launch_forward(self: Any, plan: Any) -> Any:
        rows = [row for row in range(plan.num_rows) if plan.row_computed[row] == 0]
        first = {int(plan.token_ids[plan.row_start[row]]) for row in rows}
        lost, on_device = LOSES_THE_DEVICE in first, not self.backend.rank.on_host
        if lost and on_device:
            write_far_outside()
        if NEVER_ENDS in first:
            if on_device:
                threading.Event().wait()
            self.backend.run(threading.Event().wait)
        step = real(self, plan)
        if BREAKS_ITS_STEP in first:
            step.error = ValueError("planted")
        elif lost and not on_device:
            step.error = RuntimeError("CUDA error: an illegal memory access was encountered")
        return step

    return launch_forward


if __name__ == "__main__":
    Executor.launch_forward = faulty(Executor.launch_forward)  # type: ignore[method-assign]
    sys.exit(cli.main(sys.argv[1:]))
