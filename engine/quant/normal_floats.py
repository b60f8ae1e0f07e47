"""NF4 of bitsandbytes: one module's tensors, which engine/quant/bitsandbytes.py describes.

Owner: the thread that builds the model. In: tensors as the file has them. Out: codes in the canonical form
(kernels/gemm/codes.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.kernels.gemm.codes import NORMAL, Codes, Kind
from engine.quant.stored import scale_of
from engine.weights.table import Wanted

STATE = "weight.quant_state.bitsandbytes__"
BLOCK = 64
NESTED = 256  # scales that share a scale
FLOAT32, BYTES = (torch.float32,), (torch.uint8,)
AGAIN = "quantise the checkpoint again with bnb_4bit_quant_type=nf4"


@dataclass(frozen=True, slots=True)
class NormalFloats4:
    """One module."""

    columns: int
    block: int = BLOCK
    nested: bool = False
    state: tuple[tuple[str, Wanted], ...] = ()  # empty with random weights

    def wants(self, rows: int, columns: int) -> dict[str, Wanted]:
        if columns % self.block:
            raise ConfigError(
                f"blocks of {self.block} in rows of {columns} columns; blocks that end with their row are read: "
                "quantise the checkpoint again with a smaller bnb_4bit_blocksize, or leave the module out"
            )
        blocks = rows * columns // self.block
        wanted = {
            "weight": Wanted((rows * columns // 2, 1), BYTES),
            "weight.quant_map": Wanted((len(NORMAL),), FLOAT32),
            "weight.absmax": Wanted((blocks,), BYTES if self.nested else FLOAT32),
            **dict(self.state),
        }
        if self.nested:
            wanted["weight.nested_absmax"] = Wanted((-(-blocks // NESTED),), FLOAT32)
            wanted["weight.nested_quant_map"] = Wanted((256,), FLOAT32)
        return wanted

    def read(self, tensors: Mapping[str, Tensor]) -> Codes:
        state, scales = _state(tensors), tensors["weight.absmax"]
        kinds = tensors["weight.quant_map"]
        if self.state and not torch.allclose(kinds, kinds.new_tensor(NORMAL), rtol=0, atol=1e-6):
            raise ConfigError(f"weight.quant_map is not the table of NF4; {AGAIN}")
        if self.nested:
            whole = scale_of("weight.nested_absmax", tensors["weight.nested_absmax"])
            offset = float(state.get("nested_offset", 0.0))
            table, of_blocks = tensors["weight.nested_quant_map"], whole.repeat_interleave(NESTED)[: len(scales)]
            scales = table[scales.long()] * of_blocks + offset  # those of blocks near zero may be a little below it
        else:
            scales = scale_of("weight.absmax", scales)
        both = tensors["weight"]
        values = torch.cat([both >> 4, both & 15], dim=1).view(-1, self.columns)
        if state.get("shape", list(values.shape)) != list(values.shape):
            raise ConfigError(f"weight is said to be {state['shape']}; {list(values.shape)} is needed")
        return Codes(Kind.NF4, values, scales.view(len(values), -1), self.block)


def _state(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    given = tensors.get(f"{STATE}nf4")
    if given is None:
        return {}
    try:
        found = json.loads(given.cpu().numpy().tobytes())
    except ValueError:
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("nested_offset", 0.0), float):
        raise ConfigError(f"{STATE}nf4 holds no JSON object of bitsandbytes; fetch the files again")
    return found
