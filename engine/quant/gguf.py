"""gguf: the quantised blocks of a GGUF file, whose tensor kind names the block type (weights/ggml_blocks)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.checkpoint.section import Section
from engine.kernels.gemm.codes import Codes
from engine.quant.base import Headers
from engine.quant.checks import Checks
from engine.quant.names import USUAL
from engine.weights.ggml_blocks import BLOCKS, bytes_in_memory, codes_of, line_bytes
from engine.weights.table import Wanted

DRAWN = "q8_0"  # block type of random weights


@dataclass(frozen=True, slots=True)
class Blocks:
    """The storage of one module."""

    kind: str

    @property
    def form(self) -> str:
        return self.kind.upper()

    def wants(self, rows: int, columns: int) -> dict[str, Wanted]:
        line = line_bytes(self.kind, columns)
        return {
            self.kind: Wanted((rows, line), (torch.uint8,), bytes_in_memory=rows * bytes_in_memory(self.kind, columns))
        }

    def read(self, tensors: Mapping[str, Tensor], checks: Checks) -> Codes:
        return codes_of(self.kind, tensors[self.kind])


class Gguf:
    """The dialect."""

    def __init__(self, settings: Section) -> None:
        """Reads no settings: the file names the type of each tensor."""

    def stored(self, module: str, columns: int, headers: Headers | None) -> Blocks | None:
        if headers is None:
            return None if module in USUAL or columns % BLOCKS[DRAWN][0] else Blocks(DRAWN)
        return next((Blocks(kind) for kind in BLOCKS if kind in headers), None)
