"""bitsandbytes: NF4, four bits by 64 columns, and integers of LLM.int8().

    weight [N K / 2, 1] uint8: two codes in a byte, the lower column in the high bits; blocks lie along the rows
    weight.absmax [blocks] float32: the scale of a block
    weight.quant_state.bitsandbytes__nf4: bytes of a JSON object; weight.quant_map [16]: what the codes stand for

With double quantisation weight.absmax is uint8: nested_quant_map[absmax] * nested_absmax[block // 256] + nested_offset
of the JSON object. LLM.int8(): weight [N, K] int8, SCB [N] float32, w = q * SCB / 127; inputs are kept in floats.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.checkpoint.section import Section
from engine.errors import ConfigError
from engine.kernels.gemm.codes import NORMAL, Codes, Kind
from engine.quant.base import Headers
from engine.quant.names import is_left_out
from engine.quant.stored import extras, scale_of
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


@dataclass(frozen=True, slots=True)
class Integers8:
    """LLM.int8(): columns that it would multiply in floats are codes as all others."""

    extra: tuple[tuple[str, Wanted], ...] = ()

    def wants(self, rows: int, columns: int) -> dict[str, Wanted]:
        return {
            "weight": Wanted((rows, columns), (torch.int8,)),
            "SCB": Wanted((rows,), FLOAT32),
            **dict(self.extra),
        }

    def read(self, tensors: Mapping[str, Tensor]) -> Codes:
        if "weight_format" in tensors and bool(tensors["weight_format"].any()):
            raise ConfigError("weight_format is not 0; rows as they are are read: save the checkpoint again")
        scale = scale_of("SCB", tensors["SCB"]) / 127
        return Codes(Kind.INT8, tensors["weight"], scale[:, None], tensors["weight"].shape[1])


class BitsAndBytes:
    """The dialect. The files decide what is quantised; a checkpoint of floats that asks for codes keeps its floats."""

    def __init__(self, settings: Section) -> None:
        self._four = settings.boolean("load_in_4bit", settings.boolean("_load_in_4bit", False))
        kind = settings.values.get("bnb_4bit_quant_type") or "fp4"
        if self._four and kind != "nf4":
            raise ConfigError(f"{settings.path}: bnb_4bit_quant_type={kind!r}; nf4 is read: {AGAIN}")
        self._left_out = tuple(map(str, settings.items("llm_int8_skip_modules", ())))

    def stored(self, module: str, columns: int, headers: Headers | None) -> NormalFloats4 | Integers8 | None:
        if headers is None:
            if is_left_out(module, self._left_out):
                return None
            return NormalFloats4(columns) if self._four else Integers8()
        if "SCB" in headers:
            return Integers8(tuple(extras(headers, ("weight_format",)).items()))
        if not any(kind.startswith(STATE) for kind in headers):
            return None
        if f"{STATE}nf4" not in headers:
            raise ConfigError(f"codes of another kind than nf4; {AGAIN}")
        if headers["weight"].dtype != "U8" or "weight.absmax" not in headers:
            raise ConfigError(
                f"weight has dtype {headers['weight'].dtype}; codes stored as U8, with weight.absmax, are read: "
                "quantise the checkpoint again with bnb_4bit_quant_storage=uint8"
            )
        scales = headers["weight.absmax"]
        codes = 2 * torch.Size(headers["weight"].shape).numel()
        block = codes // max(1, torch.Size(scales.shape).numel())
        return NormalFloats4(columns, block, scales.dtype == "U8", tuple(extras(headers, (f"{STATE}nf4",)).items()))


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
