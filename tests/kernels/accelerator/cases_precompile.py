"""Kernels are compiled and loaded before their launches, on other threads; the driver simulates its card."""

import threading

import pytest
import torch
import triton  # (must precede the import of any kernel file)
from triton.backends.compiler import GPUTarget

from engine.kernels.activation import Activation, launch_point, point_kernel
from engine.kernels.attention.work import work_kernel
from engine.kernels.precompile import hashed, new_indices, precompile
from engine.kernels.target import tl

X = torch.zeros(3, 64, dtype=torch.bfloat16)
GELU, GELU_TANH = Activation.GELU, Activation.GELU_TANH


class Driver:
    """The driver of an absent card; records its calls and their threads."""

    def __init__(self):
        self.utils = self
        self.loaded, self.built, self.launched = [], [], []

    def get_device_properties(self, _device):
        return {"max_shared_mem": 232448}

    def launcher_cls(self, src, _metadata):
        self.built.append((src.name, threading.current_thread().name))
        return lambda *_args: self.launched.append((src.name, threading.current_thread().name))

    def load_binary(self, name, _binary, _shared, _device):
        self.loaded.append((name, threading.current_thread().name))
        return 1, 1, 0, 0, 1024  # module, function, registers, spilled registers, threads

    def unload_module(self, _module):
        pass

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, _device):
        return 0


@pytest.fixture
def made(monkeypatch):
    """(kernel, thread) of everything compiled; each test compiles its kernels anew."""
    found = []

    def listener(*, src, **_facts):
        found.append((src.name, threading.current_thread().name))

    monkeypatch.setattr(triton.knobs.compilation, "listener", listener)
    for kernel in (point_kernel, work_kernel):
        kernel.device_caches.clear()
    return found


@pytest.fixture
def driver():
    active = Driver()
    triton.runtime.driver.set_active(active)
    return active


def forward(walk):
    """Names of the threads that were bound to the device."""
    bound = []
    precompile(walk, 2, lambda: bound.append(threading.current_thread().name))
    return bound


@triton.jit
def broken_kernel(out, SIZE: tl.constexpr):
    tl.static_assert(SIZE == 1, "only one")
    tl.store(out, 1)


def test_what_a_walk_launches_is_compiled_once_elsewhere_and_does_not_run(made, driver):
    def walk():
        for op in (GELU_TANH, GELU, GELU_TANH):
            for rows in (3, 2):
                launch_point(op, X[:rows])

    forward(walk)
    assert [name for name, _ in made] == ["point_kernel"] * 2
    assert all(thread.startswith("omniloop-compile") for _, thread in made)
    options = {"GATED": False, "BLOCK": 64, "OVERLAP": False, "num_warps": 4}
    point_kernel.run(X, X, 64, ACT=int(GELU_TANH), **options, grid=None, warmup=True)
    assert len(made) == 2  # Triton has them cached


def test_arguments_of_another_kind_compile_another_kernel(made, driver):
    def walk():
        launch_point(GELU_TANH, X)
        launch_point(GELU_TANH, torch.zeros(3, 64))
        launch_point(GELU_TANH, torch.zeros(3 * 64 + 1, dtype=X.dtype)[1:].view(3, 64))  # begins at byte 2
        launch_point(GELU_TANH, X[:, :63].contiguous())  # not a multiple of 16

    forward(walk)
    assert len(made) == 4


def test_a_kernel_that_cannot_be_compiled_says_so_and_launches_go_on_as_before(made, driver):
    run = triton.JITFunction.run
    for _ in range(2):
        with pytest.raises(triton.CompilationError, match="only one"):
            forward(lambda: broken_kernel[(1,)](X, SIZE=2))
        assert triton.JITFunction.run is run
    forward(lambda: launch_point(GELU_TANH, X))
    assert len(made) == 1


def test_a_walk_that_fails_says_why(made, driver):
    with pytest.raises(ZeroDivisionError):
        forward(lambda: print(1 / 0))


def test_what_is_compiled_before_launch_is_loaded_there_too_and_launches_find_all_made(made, driver):
    def walk():
        launch_point(GELU_TANH, X)
        launch_point(GELU, X)

    bound = forward(walk)
    assert [name for name, _ in driver.built] == [name for name, _ in driver.loaded] == ["point_kernel"] * 2
    assert {thread for _, thread in driver.built + driver.loaded} <= set(bound)
    assert not driver.launched
    walk()
    assert len(driver.launched) == len(driver.built) == len(driver.loaded) == len(made) == 2


def test_a_kernel_that_the_card_cannot_hold_says_so(made, driver):
    driver.load_binary = lambda *_args: (1, 1, 0, 0, 32)
    with pytest.raises(triton.runtime.OutOfResources, match="threads"):
        forward(lambda: launch_point(GELU_TANH, X))


def test_other_threads_launch_while_one_walks(made, driver):
    def walk():
        other = threading.Thread(target=launch_point, args=(GELU_TANH, X), name="other")
        other.start()
        other.join()
        launch_point(GELU, X)

    forward(walk)
    assert driver.launched == [("point_kernel", "other")]


def test_indices_that_no_kernel_writes_are_zeros_during_a_walk(made):
    """torch's own kernels run during a walk, and an index out of range would end the process's use of the device."""
    found = []

    def walk():
        for _ in range(3):
            old = torch.full((2, 5), 1 << 40)
            del old  # memory that is not zero may be used again
            found.append(new_indices(2, 5, dtype=torch.int64, device="cpu"))

    precompile(walk, 1, lambda: None)
    assert [each.count_nonzero() for each in found] == [0, 0, 0]


def test_tritons_files_are_hashed_on_a_thread_before_the_walk(monkeypatch):
    """Else the walking thread computes the hash when it meets the first kernel."""
    seen = []
    monkeypatch.setattr(triton.runtime.cache, "triton_key", lambda: seen.append(threading.current_thread().name))
    hashed.cache_clear()
    assert hashed() is hashed()
    precompile(lambda: seen.append("walk"), 2, lambda: None)
    hashed.cache_clear()
    assert seen == ["omniloop-hash_0", "walk"]
