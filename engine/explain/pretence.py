"""Pretence: tensors with a shape, a dtype and a device but no memory, so that a model of any size runs instantly.

Thread: any; one at a time. In: the device that tensors claim to be on, which need not be present. Inside the mode,
tensors created on that accelerator have no memory, and torch's operations on them compute only shapes, on torch's
meta device. Their values read as 0. Tensors that the host computes with stay real tensors on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Note = Callable[[str], None]  # takes the name of an operation that a device would run
# Operations that launch nothing, by how their names begin.
QUIET = ("empty", "new_empty", "detach", "lift", "set_", "_local_scalar", "scalar_tensor")
MAKING = ("empty", "empty_strided", "zeros")  # operations that allocate tensors for later results
HOSTS = (torch.int32, torch.int64, torch.bool)  # dtypes of the host's tensors: row offsets and counts
READS = ("_local_scalar_dense", "is_nonzero", "equal")  # operations that bring a number to the host


class PretendedTensor(Tensor):
    """A tensor without memory. Torch computes on its twin on the meta device; Python code sees the claimed device."""

    twin: Tensor  # on the meta device
    claimed: torch.device

    @staticmethod
    def __new__(cls, twin: Tensor, claimed: torch.device) -> PretendedTensor:
        made: PretendedTensor = torch.Tensor._make_wrapper_subclass(
            cls, twin.shape, twin.stride(), twin.storage_offset(), dtype=twin.dtype, device=twin.device
        )
        made.twin, made.claimed = twin, claimed
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise AssertionError(f"{function}: a tensor without memory is read outside of its Pretence")

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.claimed

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return self.claimed.type == "cpu"

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return self.claimed.type == "cuda"

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return False

    def data_ptr(self) -> int:
        """Address 0, which has every alignment."""
        return 0

    def untyped_storage(self) -> Any:
        """The twin's storage, whose size is the number of bytes that a real tensor would take."""
        return self.twin.untyped_storage()

    def tolist(self) -> Any:
        return torch.zeros(self.shape, dtype=self.dtype).tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return torch.zeros(self.shape, dtype=self.dtype).numpy()

    def __setitem__(self, index: Any, value: Any) -> None:
        """Fills with a number directly, because torch would first copy the number to the meta device."""
        if isinstance(value, int | float):
            self[index].fill_(value)
        else:
            super().__setitem__(index, value)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PretendedTensor({list(self.shape)}, {self.dtype}, {self.claimed})"


class Pretence(TorchDispatchMode):
    """Records each operation that a device would run; for tensors without memory it computes only shapes.

    `pretend`: tensors created on the accelerator have no memory; else all tensors are real.
    """

    def __init__(self, device: str, note: Note, pretend: bool = True) -> None:
        super().__init__()
        self.device = torch.device(device)
        self._note, self._pretend = note, pretend

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False, so that torch does not import its compiler only to skip it here; the import takes seconds."""
        return False

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> PretendedTensor:
        """A new tensor without memory."""
        return PretendedTensor(torch.empty(tuple(shape), dtype=dtype, device="meta"), self.device)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function._can_decompose():  # torch composes it of other operations, which are dispatched here one by one
            with self:
                return function.decompose(*args, **kwargs)
        name, goes = function.overloadpacket.__name__, kwargs.get("device")
        if (
            not self._is_made(name, goes, kwargs.get("dtype"))
            and not _any_pretended(args)
            and not _any_pretended(kwargs.values())
        ):
            if self.device.type == "cpu" or goes == self.device or _any_there(args, self.device):
                self._noted(function, name)
            if self._pretend and kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
            return function(*args, **kwargs)
        if name in READS:
            return name == "equal" or torch.zeros((), dtype=args[0].dtype).item()
        if name == "_to_copy" and goes is not None and type(args[0]) is PretendedTensor:
            if goes.type == "cpu" != self.device.type:  # a copy to the host
                return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
            if kwargs.get("dtype") in (None, args[0].dtype):  # no copy needed: it is on the claimed device already
                return args[0]
        self._noted(function, name)
        if goes is not None or name in MAKING:
            kwargs = {**kwargs, "device": torch.device("meta")}
        try:
            made = function(*_mapped(_twin, args), **{key: _mapped(_twin, value) for key, value in kwargs.items()})
        except NotImplementedError:  # the result's shape depends on values, which are all 0
            made = function(*_mapped(_zeros, args), **{key: _mapped(_zeros, value) for key, value in kwargs.items()})
            return made if self.device.type == "cpu" else _mapped(self._claim, _mapped(_twin, made))
        written = {id(one.twin): one for one in (*args, *kwargs.values()) if type(one) is PretendedTensor}
        return _mapped(lambda one: written[id(one)] if id(one) in written else self._claim(one), made)

    def _is_made(self, name: str, goes: torch.device | None, dtype: torch.dtype | None) -> bool:
        """Whether a newly created tensor gets no memory: on an accelerator always; on a CPU unless the host computes
        with its dtype."""
        if not self._pretend or (goes is not None and goes.type != self.device.type):
            return False
        return goes is not None if self.device.type != "cpu" else name in MAKING and dtype not in HOSTS

    def _noted(self, function: Any, name: str) -> None:
        if not function.is_view and not name.startswith(QUIET):
            self._note(name)

    def _claim(self, value: Any) -> Any:
        return PretendedTensor(value, self.device) if isinstance(value, Tensor) else value


@contextmanager
def without_driver() -> Iterator[None]:
    """A context in which torch creates tensors on an accelerator without looking for the driver."""
    found, torch.cuda._lazy_init = torch.cuda._lazy_init, lambda: None
    try:
        yield
    finally:
        torch.cuda._lazy_init = found


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Applies `change` to each argument or result, also inside lists and tuples."""
    if type(value) in (tuple, list):
        return type(value)([_mapped(change, one) for one in value])
    return change(value)


def _any_pretended(values: Iterable[Any]) -> bool:
    return any(type(one) is PretendedTensor or (type(one) in (tuple, list) and _any_pretended(one)) for one in values)


def _any_there(values: Iterable[Any], device: torch.device) -> bool:
    """Whether any value is a tensor on the device."""
    return any(
        (isinstance(one, Tensor) and one.device.type == device.type)
        or (type(one) in (tuple, list) and _any_there(one, device))
        for one in values
    )


def _twin(value: Any) -> Any:
    """A tensor's twin on the meta device; real tensors of the host are moved to the meta device too."""
    if type(value) is PretendedTensor:
        return value.twin
    return value.to("meta") if isinstance(value, Tensor) and value.device.type != "meta" else value


def _zeros(value: Any) -> Any:
    return torch.zeros(value.shape, dtype=value.dtype) if type(value) is PretendedTensor else value
