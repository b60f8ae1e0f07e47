"""auto-round: AutoRound's checkpoints, packed as GPTQ, AWQ, FP8 or compressed-tensors, with GPTQ's settings.

In: the settings in config.json; `packing_format` names the tensors' format, `extra_config` has settings of
single modules. Out: the dialect of that format.
"""

from __future__ import annotations

import re

from engine.base.errors import ConfigError
from engine.checkpoint.section import Section
from engine.quant.awq import PackedAwq
from engine.quant.base import Dialect, Headers, Stored
from engine.quant.compressed import Compressed
from engine.quant.fp8 import Fp8
from engine.quant.gptq import Gptq
from engine.quant.names import PREFIXES, entry_of
from engine.quant.rotations import refuse_rotations
from engine.quant.stored import extras

USUAL = "auto_round:auto_gptq"
LIKE_GPTQ = {"gptq", "auto_gptq", "exllama", "exllamav2", "triton", "tritonv2"}  # formats with GPTQ's packing
WHOLE = (["auto_round"], ["gptqmodel"])  # formats with GPTQ's packing that store zero points unchanged
READ = "auto_round:auto_gptq, auto_round:auto_awq, auto_round:gptqmodel, auto_round:fp8, auto_round:llm_compressor"
FLOATS = 16  # `bits` of modules that stay floats
WILD = frozenset("*+?^$()[]{}|\\")  # characters that mark a name as a regular expression
FORMATS = {("mx_fp", 4): "mxfp4-pack-quantized", ("mx_fp", 8): "mxfp8-quantized", ("nv_fp", 4): "nvfp4-pack-quantized"}


class AutoRound:
    """The dialect."""

    def __init__(self, settings: Section) -> None:
        refuse_rotations(settings)
        given = settings.values.get("backend")  # older files: the format; newer files: kernels
        older = "backend" if isinstance(given, str) and ":" in given else ""
        key = older if older and not settings.values.get("packing_format") else "packing_format"
        packing = str(settings.values.get(key) or USUAL)
        parts = packing.split(":")[1 if packing.startswith("auto_round:") else 0 :]
        self._awq, self._floats = parts[0].endswith("awq"), _of_floats(settings, parts)
        if self._floats is not None:
            return
        self._gptq = Gptq(settings)
        self._gptq.own = Extra(settings)
        if not self._awq and parts not in WHOLE and not LIKE_GPTQ.issuperset(parts):
            raise ConfigError(
                f"{settings.path}: {key}={packing!r}; read are {READ}: export the checkpoint again in one of them"
            )
        counted_down = parts == ["auto_gptq"] or (parts[0] == "gptq" and len(parts) > 1)  # stored minus 1
        self._gptq.older = parts not in WHOLE
        if not self._awq and not self._gptq.symmetric and not counted_down and parts not in WHOLE:
            raise ConfigError(
                f"{settings.path}: {key}={packing!r} without sym; auto_round:auto_gptq is read: export the checkpoint "
                "again in it"
            )

    def stored(self, module: str, columns: int, headers: Headers | None) -> Stored | None:
        if self._floats is not None:
            return self._floats.stored(module, columns, headers)
        found = self._gptq.stored(module, columns, headers)
        if found is None or not self._awq:
            return found
        return PackedAwq(found.group, tuple(extras(headers, ("bias",)).items()))


class Extra:
    """extra_config: settings of single modules, selected by name or by a regular expression."""

    def __init__(self, settings: Section) -> None:
        table = settings.section("extra_config") if settings.values.get("extra_config") else Section({}, settings.path)
        self._own = {name: table.section(name) for name in table.values}
        self._rules: list[tuple[re.Pattern[str], Section]] = []
        for name, own in self._own.items():
            if (bits := own.integer("bits", 4)) not in (4, 8) and bits < FLOATS:
                raise ConfigError(
                    f"{own.path}: bits={bits}; 4, 8 and, for floats, 16 are read: quantise the checkpoint again with "
                    "one of them"
                )
            if WILD & set(name):
                try:
                    self._rules.append((re.compile(name), own))
                except re.error as error:
                    raise ConfigError(f"{table.path}: {name!r} is no regular expression: {error}") from None

    def of(self, module: str) -> Section | None:
        """The module's own settings, possibly empty; None: the module stays floats."""
        own = entry_of(module, self._own) or next((own for rule, own in self._rules if _meets(rule, module)), None)
        return None if own is not None and own.integer("bits", 4) >= FLOATS else own or Section({}, "")

    def floats(self) -> list[str]:
        """The names of modules that stay floats, as engine/quant/names reads them."""
        in_memory = [name for name, own in self._own.items() if own.integer("bits", 4) >= FLOATS]
        return [f"re:.*(?:{name})" if WILD & set(name) else name for name in in_memory]


def _meets(rule: re.Pattern[str], module: str) -> bool:
    return any(rule.search(f"{prefix}{module}") for prefix in PREFIXES)


def _of_floats(settings: Section, parts: list[str]) -> Dialect | None:
    """The dialect of AutoRound's FP8 and FP4 codes, which use another quantiser's tensors; None: codes are integers."""
    in_memory = Extra(settings).floats() if {"llm_compressor", "fp8", "fp8_static"} & set(parts) else []
    if parts[-1] in ("fp8", "fp8_static"):
        static = parts[-1] == "fp8_static" or settings.values.get("act_dynamic") is False
        more = {"activation_scheme": "static" if static else "dynamic", "modules_to_not_convert": in_memory}
        return Fp8(Section({**settings.values, **more}, settings.path))
    if parts != ["llm_compressor"]:
        return None
    kind, bits = str(settings.values.get("data_type") or "int"), settings.size("bits")
    form = FORMATS.get((next((known for known, _ in FORMATS if kind.startswith(known)), kind), bits))
    if form is None:
        raise ConfigError(
            f"{settings.path}: data_type={kind!r} with bits={bits} in the format of llm_compressor; read are mx_fp "
            "with 4 and 8, nv_fp with 4: export the checkpoint again with one of them"
        )
    weights = {"num_bits": bits, "type": "float", "group_size": settings.integer("group_size", 32)}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return Compressed(Section({"format": form, "config_groups": groups, "ignore": in_memory}, settings.path))
