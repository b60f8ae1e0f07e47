"""Which requests an exception ends, when failed steps end the device, and which errors clients receive."""

import pytest
import torch

from engine.base.errors import (
    DeviceLostError,
    InvalidLogitsError,
    RequestError,
    TokenIdError,
    for_rows,
    is_out_of_memory,
    scope_of,
)
from engine.base.failures import FailureCount
from server.errors import from_engine

OOM = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.19 GiB of which 1.31 GiB is free."
)
DEVICE = [
    RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA"),
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("CUDA error: unspecified launch failure"),
    RuntimeError("CUDA error: uncorrectable ECC error encountered"),
    RuntimeError("CUDA error: unrecognized error code"),
    RuntimeError("HIP error: the operation cannot be performed in the present state"),
    RuntimeError("CUDA driver error: unknown error"),
    RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    RuntimeError("Triton Error [HIP]:  Code: 719, Messsage: unspecified launch failure"),
    RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx"),
    RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    RuntimeError("GraphLaunch returned 700 (an illegal memory access was encountered)"),
    RuntimeError("EventSynchronize returned 719"),
    DeviceLostError("a step did not end"),
    KeyboardInterrupt(),
    SystemExit(1),
]
STEP = [
    ValueError("CUDA error in a text of ours"),
    RuntimeError("Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"),
    RuntimeError("shape '[3]' is invalid for input of size 4"),
    RuntimeError("the relationship of these chips"),
    AssertionError(),
    MemoryError(),
    RequestError("one row"),
    InvalidLogitsError(),
    TokenIdError(100),
]
NO_ROOM = [
    torch.OutOfMemoryError(OOM),
    RuntimeError("HIP out of memory. Tried to allocate 20.00 MiB."),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("GraphLaunch returned 2 (out of memory)"),
    RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"),
]


@pytest.mark.parametrize("error", DEVICE, ids=lambda error: f"{type(error).__name__} {error}"[:50])
def test_a_lost_device_ends_everything(error):
    assert scope_of(error) == "device"
    assert not is_out_of_memory(error)
    assert FailureCount(3, 3).note_failed(error, 0.0)


@pytest.mark.parametrize("error", STEP, ids=lambda error: f"{type(error).__name__} {error}"[:50])
def test_our_own_mistakes_end_their_step(error):
    assert scope_of(error) == "step"
    assert not is_out_of_memory(error)
    assert not FailureCount(3, 3).note_failed(error, 0.0)
    answer = from_engine(for_rows(error))
    assert (answer.status, answer.reason) == (500, "internal_error")


@pytest.mark.parametrize("error", NO_ROOM, ids=lambda error: f"{type(error).__name__} {error}"[:50])
def test_s39_out_of_memory_ends_its_step_with_503(error):
    assert scope_of(error) == "step"
    assert is_out_of_memory(error)
    answer = from_engine(for_rows(error))
    assert (answer.status, answer.reason, answer.headers) == (503, "device_out_of_memory", {"retry-after": "5"})
    assert "GiB" not in answer.message


def test_an_error_of_torchs_own_device_class_is_the_devices():
    assert scope_of(torch.AcceleratorError("something new")) == "device"


def test_failed_steps_in_a_row_end_the_device():
    count = FailureCount(max_failed_steps=3, max_oom=3)
    failed = [count.note_failed(ValueError(), float(at)) for at in range(2)]
    count.note_ok()
    failed += [count.note_failed(ValueError(), float(at)) for at in range(3)]
    assert failed == [False, False, False, False, True]


def test_steps_without_room_end_the_device_when_they_come_within_a_minute():
    count = FailureCount(max_failed_steps=1, max_oom=3)
    error = torch.OutOfMemoryError(OOM)
    assert [count.note_failed(error, at) for at in (0.0, 50.0, 61.0, 109.0, 122.5, 122.6)] == [
        False, False, False, True, False, True,
    ]  # fmt: skip
    count.note_ok()
    assert count.note_failed(error, 123.0), "a good step between them does not make room"


def test_one_step_without_room_may_be_one_too_many():
    assert FailureCount(max_failed_steps=3, max_oom=1).note_failed(torch.OutOfMemoryError(OOM), 5.0)
