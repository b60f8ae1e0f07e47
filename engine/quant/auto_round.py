"""auto-round: checkpoints of AutoRound, packed as GPTQ's or as AWQ's, with GPTQ's settings."""

from __future__ import annotations

from engine.checkpoint.section import Section
from engine.errors import ConfigError
from engine.quant.awq import PackedAwq
from engine.quant.base import Headers, Stored
from engine.quant.gptq import Gptq
from engine.quant.stored import extras


class AutoRound:
    """The dialect."""

    def __init__(self, settings: Section) -> None:
        self._gptq = Gptq(settings)
        packing = str(settings.values.get("packing_format") or "auto_round:auto_gptq")
        self._awq = packing.endswith("awq")
        if not self._awq and not packing.endswith("gptq"):
            raise ConfigError(
                f"{settings.path}: packing_format={packing!r}; read are auto_round:auto_gptq, auto_round:auto_awq: "
                "export the checkpoint again in one of them"
            )
        if not self._awq and not self._gptq.symmetric and not packing.endswith("auto_gptq"):
            raise ConfigError(f"{settings.path}: packing_format={packing!r} without sym; auto_round:auto_gptq is read")

    def stored(self, module: str, columns: int, headers: Headers | None) -> Stored | None:
        found = self._gptq.stored(module, columns, headers)
        if found is None or not self._awq:
            return found
        return PackedAwq(found.group, tuple(extras(headers, ("bias",)).items()))
