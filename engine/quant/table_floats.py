"""NF4 and FP4 of bitsandbytes: the storage of one module (engine/quant/bitsandbytes.py describes the tensors).

Owner: the thread that builds the model. In: the file's tensors. Out: codes in the canonical form
(kernels/gemm/codes.py). Twelve times an FP4 value is an E4M3 value, so FP4 codes take a byte in memory. Blocks run
along the flattened matrix; if rows do not end at a block boundary (towers: 3420 and 4304 columns), the matrix becomes
floats.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.base.errors import ConfigError
from engine.kernels.gemm.codes import NORMAL, Codes, Kind
from engine.quant.checks import Checks
from engine.quant.stored import scale_of
from engine.weights.table import Wanted

STATE = "weight.quant_state.bitsandbytes__"
BLOCK = 64
NESTED = 256  # scales per nested scale
FLOAT32, BYTES = (torch.float32,), (torch.uint8,)
TWELVE = 12.0
# The values of FP4 codes, times twelve: https://github.com/bitsandbytes-foundation/bitsandbytes, get_4bit_type in
# bitsandbytes/functional.py.
FP4 = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0, -0.0, -0.0625, -8.0, -12.0, -4.0, -6.0, -2.0, -3.0)
TABLES = {"nf4": NORMAL, "fp4": tuple(value / TWELVE for value in FP4)}
AGAIN = "quantise the checkpoint again with bnb_4bit_quant_type=nf4 or fp4"


@dataclass(frozen=True, slots=True)
class TableFloats4:
    """The storage of one module."""

    table: str  # a key of TABLES
    columns: int
    block: int = BLOCK
    nested: bool = False
    state: tuple[tuple[str, Wanted], ...] = ()  # empty with random weights

    @property
    def form(self) -> str:
        return f"{self.table.upper()} by {self.block}"

    @property
    def widens(self) -> bool:
        """Whether the matrix becomes floats in memory."""
        return self.columns % self.block != 0

    def wants(self, rows: int, columns: int) -> dict[str, Wanted]:
        blocks = -(-rows * columns // self.block)
        in_memory = torch.int32 if self.widens else torch.int16 if self.table == "fp4" else None  # per byte
        wanted = {
            "weight": Wanted((rows * columns // 2, 1), BYTES, in_memory=in_memory),
            "weight.quant_map": Wanted((16,), FLOAT32),
            "weight.absmax": Wanted((blocks,), BYTES if self.nested else FLOAT32),
            **dict(self.state),
        }
        if self.nested:
            wanted["weight.nested_absmax"] = Wanted((-(-blocks // NESTED),), FLOAT32)
            wanted["weight.nested_quant_map"] = Wanted((256,), FLOAT32)
        return wanted

    def read(self, tensors: Mapping[str, Tensor], checks: Checks) -> Codes | Tensor:
        state, scales = self._state(tensors), tensors["weight.absmax"]
        kinds = tensors["weight.quant_map"]
        if self.state and not torch.allclose(kinds, kinds.new_tensor(TABLES[self.table]), rtol=0, atol=1e-6):
            raise ConfigError(f"weight.quant_map is not the table of {self.table.upper()}; {AGAIN}")
        if self.nested:
            whole = scale_of("weight.nested_absmax", tensors["weight.nested_absmax"], checks)
            offset = float(state.get("nested_offset", 0.0))
            table, of_blocks = tensors["weight.nested_quant_map"], whole.repeat_interleave(NESTED)[: len(scales)]
            scales = table[scales.long()] * of_blocks + offset  # near zero a scale may be slightly negative
        else:
            scales = scale_of("weight.absmax", scales, checks)
        both = tensors["weight"]
        values = torch.cat([both >> 4, both & 15], dim=1).view(-1, self.columns)
        if state.get("shape", list(values.shape)) != list(values.shape):
            raise ConfigError(f"weight is said to be {state['shape']}; {list(values.shape)} is needed")
        if self.widens:
            table = torch.tensor(TABLES[self.table], device=values.device)
            of_each = scales.repeat_interleave(self.block)[: values.numel()]
            return table[values.long()] * of_each.view_as(values)
        scales = scales.view(len(values), -1)
        if self.table == "nf4":
            return Codes(Kind.NF4, values, scales, self.block)
        codes = torch.tensor(FP4, device=values.device).to(torch.float8_e4m3fn).view(torch.uint8)
        return Codes(Kind.E4M3, codes[values.long()], scales / TWELVE, self.block)

    def _state(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        given = tensors.get(f"{STATE}{self.table}")
        if given is None:
            return {}
        try:
            found = json.loads(given.cpu().numpy().tobytes())
        except ValueError:
            found = None
        if not isinstance(found, dict) or not isinstance(found.get("nested_offset", 0.0), float):
            raise ConfigError(f"{STATE}{self.table} holds no JSON object of bitsandbytes; fetch the files again")
        return found
