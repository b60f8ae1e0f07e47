"""forms: a line for the operator about the forms of a model's matrices in memory.

Thread: the thread that builds the model or runs `check`. In: a model whose parts have their schemes (assign.py). Out: a
text: the forms, the number of matrices in each, the bytes of their codes and of the same matrices in bfloat16, and the
dtype of the products.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from engine.device.memory import gib
from engine.quant.base import Quantised
from engine.weights.table import Wanted, Weighted, parts_of

if TYPE_CHECKING:
    from engine.kernels.target import Target

FLOAT_BYTES = 2  # bytes of a bfloat16


def form_line(model: Weighted, device: Target | None) -> str | None:
    """The line; None: nothing is quantised. device: the accelerator; None: a CPU."""
    float8_units = device is not None and device.multiplies_float8
    settings = model.config.raw.get("quantization_config")
    if settings is None:
        return None
    forms: Counter[str] = Counter()
    in_memory = inputs = integers = coded = floats = 0
    part: Any
    for row, names, part in parts_of(model.weight_table(), model):
        if stacked := getattr(part, "stacked_codes", 0):
            forms["MXFP4" if part.stacked_as is None else part.stacked_as.form] += stacked
            inputs += stacked * getattr(part.stacked_as, "quantises_inputs", False)
            floats += FLOAT_BYTES * part.num_experts * sum(part.pieces) * part.in_features
            coded += sum(_bytes(pieces) for kind, pieces in part.expects().items() if not kind.endswith("bias"))
            continue
        if hasattr(part, "stacked") and not hasattr(part, "scheme"):  # unquantised experts in one tensor
            in_memory += part.num_experts * len(part.pieces)
            continue
        scheme = getattr(part, "scheme", None)
        if scheme is None or getattr(part, "in_floats", False):  # routers are floats in memory
            continue
        if not isinstance(scheme, Quantised):
            in_memory += len(names)
            continue
        rows = part.pieces * part.num_experts if "#" in row.names[0] else part.out_features
        wanted = part.expects()
        for number, stored in enumerate(scheme.pieces):
            if stored is None or getattr(stored, "widens", False):
                in_memory += 1
                continue
            forms[stored.form] += 1
            floats += FLOAT_BYTES * rows[number] * part.in_features
            coded += sum(_bytes(pieces[number : number + 1]) for kind, pieces in wanted.items() if kind != "bias")
            inputs += getattr(stored, "quantises_inputs", False)
            integers += getattr(stored, "quantised_inputs", False)
    method, matrices = settings["quant_method"], forms.total()
    said = [
        f"quantised weights ({method}): {matrices} matrices are codes in memory, {in_memory} are floats",
        ", ".join(f"{count} {form}" for form, count in forms.most_common()),
        f"codes and scales take {gib(coded)}, in bfloat16 these matrices take {gib(floats)}" if matrices else "",
        "products widen codes to what they multiply" if matrices > integers else "",
        f"inputs of {integers} become INT8" if integers else "",
    ]
    if inputs and float8_units:
        said.append(f"inputs of {inputs} become FP8 too")
    elif inputs:
        said.append(f"FP8 inputs of {inputs} are kept in floats, as this device has no units for FP8")
    return "; ".join(text for text in said if text)


def _bytes(pieces: tuple[Wanted | None, ...]) -> int:
    return sum(wanted.num_bytes(torch.bfloat16) for wanted in pieces if wanted is not None)
