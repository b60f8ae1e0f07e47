"""Kernels are compiled ahead of their launches, on other threads; by a driver that knows its card and cannot launch."""

import threading

import pytest
import torch
import triton  # (before any kernel file, so that they take it)
from triton.backends.compiler import GPUTarget

from engine.kernels.activation import GELU_ERF, SILU, launch_point, point_kernel
from engine.kernels.attention.work import work_kernel
from engine.kernels.compile_ahead import compile_ahead
from engine.kernels.target import tl

X = torch.zeros(3, 64, dtype=torch.bfloat16)


class Driver:
    """Of a card that is not there."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, _device):
        return 0


@pytest.fixture
def made(monkeypatch):
    """(kernel, thread) of all that was compiled, each test's kernels anew."""
    found = []

    def listener(*, src, **_facts):
        found.append((src.name, threading.current_thread().name))

    monkeypatch.setattr(triton.knobs.compilation, "listener", listener)
    triton.runtime.driver.set_active(Driver())
    for kernel in (point_kernel, work_kernel):
        kernel.device_caches.clear()
    return found


@triton.jit
def broken_kernel(out, SIZE: tl.constexpr):
    tl.static_assert(SIZE == 1, "only one")
    tl.store(out, 1)


def test_what_a_walk_launches_is_compiled_once_elsewhere_and_does_not_run(made):
    def walk():
        for op in (SILU, GELU_ERF, SILU):
            for rows in (3, 2):
                launch_point(op, X[:rows])

    compile_ahead(walk, 2)
    assert [name for name, _ in made] == ["point_kernel"] * 2
    assert all(thread.startswith("omniloop-compile") for _, thread in made)
    point_kernel.run(X, X, 64, OP=SILU, GATED=False, BLOCK=64, OVERLAP=False, num_warps=4, grid=None, warmup=True)
    assert len(made) == 2  # Triton knows it


def test_arguments_that_make_other_kernels_are_told_apart(made):
    def walk():
        launch_point(SILU, X)
        launch_point(SILU, torch.zeros(3, 64))
        launch_point(SILU, torch.zeros(3 * 64 + 1, dtype=X.dtype)[1:].view(3, 64))  # begins at 2 bytes
        launch_point(SILU, X[:, :63].contiguous())  # not a multiple of 16

    compile_ahead(walk, 2)
    assert len(made) == 4


def test_a_kernel_that_cannot_be_compiled_says_so_and_launches_go_on_as_before(made):
    run = triton.JITFunction.run
    for _ in range(2):
        with pytest.raises(triton.CompilationError, match="only one"):
            compile_ahead(lambda: broken_kernel[(1,)](X, SIZE=2), 2)
        assert triton.JITFunction.run is run
    compile_ahead(lambda: launch_point(SILU, X), 2)
    assert len(made) == 1


def test_a_walk_that_fails_says_why(made):
    with pytest.raises(ZeroDivisionError):
        compile_ahead(lambda: print(1 / 0), 2)


def test_other_threads_launch_while_one_walks(made):
    """They get as far as the driver, which has no way to."""
    seen = []

    def launch():
        try:
            launch_point(SILU, X)
        except AttributeError as error:
            seen.append(str(error))

    def walk():
        other = threading.Thread(target=launch)
        other.start()
        other.join()
        launch_point(SILU, X)

    compile_ahead(walk, 2)
    (error,) = seen
    assert "Driver" in error
