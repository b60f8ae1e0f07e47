"""The table quant_method -> dialect: a dialect is a file of this folder and one line here.

Thread: any; filled at import. A dialect reads `quantization_config` once and returns each module's stored form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from engine.quant.auto_round import AutoRound
from engine.quant.awq import Awq
from engine.quant.bitsandbytes import BitsAndBytes
from engine.quant.compressed import Compressed
from engine.quant.fp8 import Fp8
from engine.quant.gguf import Gguf
from engine.quant.gptq import Gptq
from engine.quant.modelopt import ModelOpt
from engine.quant.mxfp4 import Mxfp4
from engine.quant.online import ONLINE, Online
from engine.quant.w8a8 import FP8, INT8, w8a8

if TYPE_CHECKING:
    from engine.checkpoint.section import Section
    from engine.quant.base import Dialect

DIALECTS: dict[str, Callable[[Section], Dialect]] = {
    "auto-round": AutoRound,
    "awq": Awq,
    "bitsandbytes": BitsAndBytes,
    "compressed-tensors": Compressed,
    "fbgemm_fp8": Fp8,
    "fp8": Fp8,
    "gguf": Gguf,
    "gptq": Gptq,
    "modelopt": ModelOpt,
    "mxfp4": Mxfp4,
    "mxfp8": Fp8,
    FP8: w8a8,
    INT8: w8a8,
    ONLINE: Online,
}
