"""w8a8_int8 and w8a8_fp8: SGLang's names for compressed-tensors checkpoints with a scale per row.

In: settings that name the modules left out. Out: the dialect of compressed-tensors, with inputs quantised per token.
"""

from __future__ import annotations

from engine.checkpoint.section import Section
from engine.quant.compressed import Compressed

INT8, FP8 = "w8a8_int8", "w8a8_fp8"


def w8a8(settings: Section) -> Compressed:
    """The dialect."""
    floats = settings.values.get("quant_method") == FP8
    kind = {"num_bits": 8, "type": "float" if floats else "int"}
    weights, inputs = {**kind, "strategy": "channel"}, {**kind, "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    said = {
        "format": "float-quantized" if floats else "int-quantized",
        "config_groups": {"group_0": group},
        "ignore": list(settings.items("ignore", ())),
    }
    return Compressed(Section(said, settings.path))
