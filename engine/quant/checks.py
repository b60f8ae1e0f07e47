"""Checks: conditions that the values of a part's codes and scales must meet.

Owner: the thread that builds the model. In: masks, while the part's matrices are read. Out: a ConfigError about the
first mask with an element that is True. A CPU looks at each mask at once. On an accelerator each look waits for all
launched work, so the counts of all masks are looked at together when the part has been read:

    with Checks(placement.device) as checks:      read | read | ... | look
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from engine.base.errors import ConfigError


@contextmanager
def named(module: str) -> Iterator[None]:
    """Prefixes a ConfigError with the module's name."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{module}: {error}") from None


class Checks:
    """The conditions of one part; a context that looks at them on exit."""

    def __init__(self, device: str) -> None:
        self._at_once = device == "cpu"
        self._module = ""  # that is read now; "": none
        # Of each mask: the module, its size, the number of its elements that are True, the error.
        self._found: list[tuple[str, int, Tensor, str]] = []

    def __enter__(self) -> Checks:
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        """Looks also when a later matrix raises a ConfigError: the first error is reported."""
        if self._found and (kind is None or issubclass(kind, ConfigError)):
            self._look()

    @contextmanager
    def of(self, module: str) -> Iterator[None]:
        """Errors of these reads begin with the module's name."""
        self._module = module
        with named(module):
            yield
        self._module = ""

    def none(self, mask: Tensor, text: str) -> None:
        """Raises ConfigError, now or on exit, if elements are True; {count} in the text becomes their number, {size}
        that of all."""
        if not self._at_once:
            self._found.append((self._module, mask.numel(), mask.sum(), text))
        elif mask.any():
            raise ConfigError(text.format(count=int(mask.sum()), size=mask.numel()))

    def _look(self) -> None:
        counts = torch.stack([count for _, _, count, _ in self._found])
        if not counts.any():
            return
        for (module, size, _, text), count in zip(self._found, counts.tolist()):
            if count:
                said = text.format(count=count, size=size)
                raise ConfigError(f"{module}: {said}" if module else said)
