"""The thread pool: sizes, two concurrent callers, no leftover thread, a clean end of the process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest
import torch

from _fast import cpu
from engine.kernels.gemm.panels import pack_panels
from engine.kernels.target import target


def threads_of_process() -> set[str]:
    return set(os.listdir("/proc/self/task"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="names threads in /proc")
def test_threads_come_and_go_with_the_number_wanted():
    cpu.set_num_threads(1)
    before = threads_of_process()
    cpu.set_num_threads(5)
    assert cpu.num_threads() == 5
    workers = threads_of_process() - before
    assert len(workers) == 4
    cpu.set_num_threads(1)
    deadline = time.monotonic() + 10
    while workers & threads_of_process():  # a joined thread may stay in /proc for a moment
        assert time.monotonic() < deadline, "a worker that is not wanted lives on"
        time.sleep(0.001)


def test_zero_means_one_thread_per_core():
    cpu.set_num_threads(0)
    assert cpu.num_threads() == cpu.num_cores()


def test_two_callers_at_once_both_get_their_results():
    cpu.set_num_threads(3)
    packed = pack_panels(torch.randn(512, 256), None)
    inputs = [torch.randn(16, 256) for _ in range(4)]
    expected = [packed.linear(x) for x in inputs]
    wrong = []

    def call(x, y):
        for _ in range(200):
            if not torch.equal(packed.linear(x), y):
                wrong.append(1)

    callers = [threading.Thread(target=call, args=pair) for pair in zip(inputs, expected)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def test_a_process_that_computed_ends_by_itself():
    code = (
        "import torch; from _fast import cpu; from engine.kernels.gemm.panels import pack_panels;"
        "cpu.set_num_threads(4); pack_panels(torch.randn(4096, 512), None).linear(torch.randn(64, 512))"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_forked_child_computes_with_threads_of_its_own():
    code = (
        "import os, torch; from _fast import cpu; from engine.kernels.gemm.panels import pack_panels;"
        "torch.set_num_threads(1); cpu.set_num_threads(3); x, p = torch.randn(64, 512), torch.randn(4096, 512);"
        "p = pack_panels(p, None);"
        "y = p.linear(x); pid = os.fork();"
        "pid or os._exit(0 if torch.equal(p.linear(x), y) else 1);"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_target_names_this_machine():
    assert target().num_units >= 1
    assert cpu.isa() in ("plain", "avx2", "avx512")
