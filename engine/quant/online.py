"""--quantization: quantises a float checkpoint to FP8 while it is read, and checks names of checkpoints' methods.

Owner: the thread that builds the model. In: the flag's value, the configuration. Out: the configuration that the
model is built from. Each row of a decoder layer's matrix gets its own scale, its largest magnitude / 448, also for
experts in one tensor. Embeddings, the head, norms, routers and towers stay floats. A part is quantised when its pieces
are complete, so there is no second copy of the model. Inputs are quantised per token on devices with FP8 units.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from engine.base.errors import ConfigError
from engine.checkpoint.section import Section
from engine.kernels.gemm.codes import LARGEST, Codes, Inputs, Kind
from engine.quant.base import Headers
from engine.quant.checks import Checks
from engine.weights.table import FLOATS, Wanted

if TYPE_CHECKING:
    from engine.base.model_config import ModelConfig

AT_ONCE = 1 << 23  # values quantised at a time
ONLINE = "fp8 online"  # our quant_method for online quantisation; no checkpoint has this value
# vLLM's and SGLang's names for kernels of a method, and other spellings -> methods.
ALIASES = {
    "auto_gptq": ("gptq",),
    "gptq_marlin": ("gptq",),
    "gptq_bitblas": ("gptq",),
    "marlin": ("gptq",),
    "auto_awq": ("awq",),
    "awq_marlin": ("awq",),
    "cpu_awq": ("awq",),
    "moe_wna16": ("gptq", "awq"),
    "ipex": ("gptq", "awq"),
    "auto_round": ("auto-round",),
    "inc": ("auto-round",),
    "compressed_tensors": ("compressed-tensors",),
    "w8a8_int8": ("compressed-tensors", "w8a8_int8"),
    "w8a8_fp8": ("compressed-tensors", "w8a8_fp8"),
    "modelopt_fp8": ("modelopt",),
    "modelopt_fp4": ("modelopt",),
    "modelopt_mixed": ("modelopt",),
    "modelopt_mxfp8": ("modelopt",),
    "petit_nvfp4": ("modelopt",),
    "gpt_oss_mxfp4": ("mxfp4",),
    "bnb": ("bitsandbytes",),
}
# vLLM's and SGLang's names for online FP8: a scale per row, inputs quantised per token.
OF_FLOATS = ("fp8", "fp8_per_channel", "ptpc_fp8", "w8a8_fp8")


def requested(config: ModelConfig, word: str) -> ModelConfig:
    """The configuration for the value `word` of `--quantization`; "": as in the checkpoint."""
    if not word:
        return config
    own = (config.raw.get("quantization_config") or {}).get("quant_method")
    named = ALIASES.get(word.lower(), (word.lower(),))
    if own in named:
        return config
    if own is not None:
        raise ConfigError(f"--quantization {word}: the checkpoint is quantised by {own}; leave the flag out")
    if word.lower() not in OF_FLOATS:
        how = f"by {' or '.join(named)}" if word.lower() in ALIASES else "already"
        raise ConfigError(
            f"--quantization {word}: this checkpoint is not quantised, and fp8 is what is made of floats; ask for fp8, "
            f"leave the flag out, or serve a checkpoint that is quantised {how}"
        )
    return replace(config, raw={**config.raw, "quantization_config": {"quant_method": ONLINE}})


@dataclass(frozen=True, slots=True)
class Floats:
    """The storage of a float matrix that is quantised while it is read."""

    quantises_inputs: ClassVar[bool] = True
    form: ClassVar[str] = "FP8 by rows"

    def wants(self, rows: int, columns: int) -> dict[str, Wanted]:
        return {"weight": Wanted((rows, columns), FLOATS, in_memory=torch.float8_e4m3fn)}

    def read(self, tensors: Mapping[str, Tensor], checks: Checks) -> Codes:
        """Quantises some rows at a time, because float32 copies of all rows take twice the file's bytes. Rows of zeros
        get scale 1."""
        weight = tensors["weight"]
        values = weight.new_empty(weight.shape, dtype=torch.float8_e4m3fn)
        scale = weight.new_empty(len(weight), 1, dtype=torch.float32)
        each = max(1, AT_ONCE // weight.shape[1])
        for first in range(0, len(weight), each):
            rows = slice(first, first + each)
            wide = weight[rows].float()
            most = torch.linalg.vector_norm(wide, float("inf"), 1, keepdim=True)
            scale[rows] = torch.where(most > 0, most / LARGEST, 1.0)
            values[rows] = (wide / scale[rows]).clamp_(-LARGEST, LARGEST)  # beyond, the cast gives NaN
        return Codes(Kind.E4M3, values.view(torch.uint8), scale, weight.shape[1], inputs=Inputs(kind=Kind.E4M3))


class Online:
    """The dialect."""

    def __init__(self, settings: Section) -> None:
        """Reads no settings."""

    def stored(self, module: str, columns: int, headers: Headers | None) -> Floats | None:
        in_layer = module.startswith(("layers.", "blocks.")) and not module.endswith(("gate", "router"))
        return Floats() if in_layer else None
