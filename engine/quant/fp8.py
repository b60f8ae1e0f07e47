"""fp8: float8_e4m3fn weights, with Hugging Face's or Mistral's names; w = code * scale, also for names with "inv".

weight [N, K]    weight_scale_inv [ceil(N / 128), ceil(K / 128)], or a scalar: weight_scale(_inv), scale, qscale_weight
mxfp8 (MiniMax-M3, SGLang) has weight_scale_inv [N, K / 32] uint8, powers of two
fbgemm_fp8 (Llama 3.1 405B) has weight_scale [N, 1]; `activation_scale_ub`, an upper bound of the inputs' scales, is
ignored, because it would clip the largest inputs. Inputs are quantised per token, with block scales per 128 columns of
a token (`ue8m0`: powers of two), or by input_scale.
"""

from __future__ import annotations

from engine.base.errors import ConfigError
from engine.checkpoint.section import Section
from engine.quant.base import Headers
from engine.quant.floats8 import Floats8, floats8
from engine.quant.names import left_out
from engine.quant.stored import POWERS, SCALES

SMALL = (1, 32)  # block of mxfp8: rows, columns
SCALE_NAMES = ("weight_scale_inv", "weight_scale", "scale", "qscale_weight")


class Fp8:
    """The dialect."""

    def __init__(self, settings: Section) -> None:
        scheme = settings.values.get("activation_scheme", "dynamic")
        if scheme not in ("dynamic", "static"):
            raise ConfigError(f"{settings.path}: activation_scheme={scheme!r}; read are dynamic, static")
        self._inputs = "given" if scheme == "static" else "token"
        found = settings.items("weight_block_size", ())
        if found and (len(found) != 2 or any(type(size) is not int or size < 1 for size in found)):
            raise ConfigError(f"{settings.path}: weight_block_size={found} must be two sizes, as [128, 128]")
        self._block: tuple[int, int] | None = (found[0], found[1]) if found else None
        method = settings.values.get("quant_method")
        self._per = "row" if method == "fbgemm_fp8" else "tensor"  # scales if there are no blocks
        self._small = method == "mxfp8" or self._block == SMALL
        self._powers = settings.values.get("scale_fmt") == "ue8m0"
        names = settings.items("modules_to_not_convert", settings.items("ignored_layers", ()))
        self._left_out = left_out(names, settings.path, inside=True)

    def stored(self, module: str, columns: int, headers: Headers | None) -> Floats8 | None:
        if headers is None:
            if module in self._left_out:
                return None
            if self._small:
                return Floats8("weight_scale_inv", POWERS[1:], "group", SMALL)
            if self._block is None:
                return Floats8("weight_scale_inv", SCALES, self._per, inputs=self._inputs)
            scales = (*SCALES, *POWERS)
            return Floats8("weight_scale_inv", scales, "block", self._block, inputs="token", powers=self._powers)
        if "weight" not in headers or headers["weight"].dtype != "F8_E4M3":
            return None
        scale = next((name for name in SCALE_NAMES if name in headers), None)
        if scale is None:
            raise ConfigError(f"FP8 codes without a scale; one of {', '.join(SCALE_NAMES)} is needed")
        return floats8(scale, headers, self._block or (128, 128), self._inputs, self._powers)
