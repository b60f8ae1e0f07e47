"""bitsandbytes: NF4 and FP4 (4-bit codes in blocks of 64 columns), and the integers of LLM.int8().

    weight [N K / 2, 1] uint8: two codes in a byte, the lower column in the high bits; blocks run along the rows
    weight.absmax [blocks] float32: the scale of a block
    weight.quant_state.bitsandbytes__nf4 or __fp4: bytes of a JSON object; weight.quant_map [16]: the codes' values

With double quantisation weight.absmax is uint8 and the scale is nested_quant_map[absmax] * nested_absmax[block // 256]
+ nested_offset, which is in the JSON object. LLM.int8(): weight [N, K] int8, SCB [N] float32, w = q * SCB / 127; inputs
stay floats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.base.errors import ConfigError
from engine.checkpoint.section import Section
from engine.kernels.gemm.codes import Codes, Kind
from engine.quant.base import Headers
from engine.quant.checks import Checks
from engine.quant.names import left_out
from engine.quant.stored import check_whole, extras, scale_of
from engine.quant.table_floats import AGAIN, FLOAT32, STATE, TABLES, TableFloats4
from engine.weights.table import Wanted

SIZES = (64, 32, 128, 256, 512, 1024, 2048, 4096)  # supported block sizes


@dataclass(frozen=True, slots=True)
class Integers8:
    """LLM.int8(); its outlier columns, which it multiplies in floats, are multiplied as codes here."""

    extra: tuple[tuple[str, Wanted], ...] = ()

    @property
    def form(self) -> str:
        return "INT8 by rows"

    def wants(self, rows: int, columns: int) -> dict[str, Wanted]:
        return {
            "weight": Wanted((rows, columns), (torch.int8,)),
            "SCB": Wanted((rows,), FLOAT32),
            **dict(self.extra),
        }

    def read(self, tensors: Mapping[str, Tensor], checks: Checks) -> Codes:
        if "weight_format" in tensors:
            text = "weight_format is not 0; rows as they are are read: save the checkpoint again"
            checks.none(tensors["weight_format"] != 0, text)
        scale = scale_of("SCB", tensors["SCB"], checks) / 127
        return Codes(Kind.INT8, tensors["weight"], scale[:, None], tensors["weight"].shape[1])


def _block(codes: int, scales: int) -> int:
    """The number of codes per scale; the last block may be shorter."""
    found = next((size for size in SIZES if -(-codes // size) == scales), 0)
    if not found:
        sizes = ", ".join(map(str, SIZES))
        raise ConfigError(f"{scales} scales for {codes} codes; blocks of {sizes} codes are read: fetch the files again")
    return found


class BitsAndBytes:
    """The dialect. The files decide which modules are quantised; float checkpoints are not quantised at load."""

    def __init__(self, settings: Section) -> None:
        self._four = settings.boolean("load_in_4bit", settings.boolean("_load_in_4bit", False))
        self._table = settings.values.get("bnb_4bit_quant_type") or "fp4"
        if self._four and self._table not in ("nf4", "fp4"):
            raise ConfigError(f"{settings.path}: bnb_4bit_quant_type={self._table!r}; nf4 and fp4 are read: {AGAIN}")
        self._left_out = left_out(settings.items("llm_int8_skip_modules", ()), settings.path, inside=True)

    def stored(self, module: str, columns: int, headers: Headers | None) -> TableFloats4 | Integers8 | None:
        if headers is None:
            if module in self._left_out:
                return None
            return TableFloats4(self._table, columns) if self._four else Integers8()
        if "SCB" in headers:
            check_whole(headers, "SCB", "weight", "weight_format")
            return Integers8(tuple(extras(headers, ("weight_format",)).items()))
        if "weight" in headers and headers["weight"].dtype == "I8":
            check_whole(headers, "codes of I8", "SCB")
        states = [kind for kind in headers if kind.startswith("weight.")]
        if not states:
            return None
        state = next((kind for kind in states if kind.startswith(STATE)), None)
        if state is None:
            check_whole(headers, states[0], f"{STATE}{self._table}")
        table = str(state).removeprefix(STATE)
        if table not in TABLES:
            raise ConfigError(f"codes of another kind ({table}) than nf4 and fp4; {AGAIN}")
        check_whole(headers, f"{STATE}{table}", "weight", "weight.absmax")
        if headers["weight"].dtype != "U8":
            raise ConfigError(
                f"weight has dtype {headers['weight'].dtype}; codes stored as U8 are read: quantise the checkpoint "
                "again with bnb_4bit_quant_storage=uint8"
            )
        scales = headers["weight.absmax"]
        codes = 2 * torch.Size(headers["weight"].shape).numel()
        block = _block(codes, torch.Size(scales.shape).numel())
        extra = ((f"{STATE}{table}", Wanted(headers[f"{STATE}{table}"].shape, (torch.uint8,))),)
        return TableFloats4(table, columns, block, scales.dtype == "U8", extra)
