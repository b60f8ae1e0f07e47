"""auto-round: checkpoints of AutoRound, packed as GPTQ's or as AWQ's, with GPTQ's settings."""

from __future__ import annotations

from engine.checkpoint.section import Section
from engine.errors import ConfigError
from engine.quant.awq import PackedAwq
from engine.quant.base import Headers, Stored
from engine.quant.gptq import Gptq
from engine.quant.stored import extras

USUAL = "auto_round:auto_gptq"
LIKE_GPTQ = {"gptq", "auto_gptq", "exllama", "exllamav2", "triton", "tritonv2"}  # whose words lie as GPTQ's do


class AutoRound:
    """The dialect."""

    def __init__(self, settings: Section) -> None:
        self._gptq = Gptq(settings)
        given = settings.values.get("backend")  # which files had before packing_format; later it names kernels
        older = "backend" if isinstance(given, str) and ":" in given else ""
        key = older if older and not settings.values.get("packing_format") else "packing_format"
        packing = str(settings.values.get(key) or USUAL)
        parts = packing.split(":")[1 if packing.startswith("auto_round:") else 0 :]
        self._awq = parts[0].endswith("awq")
        if not self._awq and not LIKE_GPTQ.issuperset(parts):
            raise ConfigError(
                f"{settings.path}: {key}={packing!r}; read are auto_round:auto_gptq, auto_round:auto_awq: export the "
                "checkpoint again in one of them"
            )
        counted_down = parts == ["auto_gptq"] or (parts[0] == "gptq" and len(parts) > 1)  # zero points less 1
        if not self._awq and not self._gptq.symmetric and not counted_down:
            raise ConfigError(f"{settings.path}: {key}={packing!r} without sym; auto_round:auto_gptq is read")

    def stored(self, module: str, columns: int, headers: Headers | None) -> Stored | None:
        found = self._gptq.stored(module, columns, headers)
        if found is None or not self._awq:
            return found
        return PackedAwq(found.group, tuple(extras(headers, ("bias",)).items()))
