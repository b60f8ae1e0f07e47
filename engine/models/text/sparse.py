"""Sparse: Llama's layers with experts in some layers, and the weight rows of experts.

Thread: device. A family's `text` function says which layers have experts (engine/checkpoint/experts).
"""

from __future__ import annotations

from dataclasses import replace

from engine.base.model_config import TextConfig
from engine.models.text.llama import DECODER_IGNORE, DECODER_ROWS, Llama
from engine.weights.table import Row, Table


def sparse_rows(
    block: str = "layers.*.mlp.",
    router: str = "gate",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    shared: str = "shared_experts",
    correction: str = "gate",
) -> tuple[Row, ...]:
    """The weight rows of layers with experts whose matrices are separate modules.

    block: prefix of all other names. names: an expert's gate, up and down. correction: the module with the correction.
    """
    gate, up, down = (f"{block}experts.#.{name}" for name in names)
    shared_gate, shared_up, shared_down = (f"{block}{shared}.{name}" for name in ("gate_proj", "up_proj", "down_proj"))
    return (
        Row((block + router,), "layers.*.experts.router"),
        Row(((block + correction).rstrip("."),), "layers.*.experts.correction"),
        Row((gate, up), "layers.*.experts.gate_up", "rows"),
        Row((down,), "layers.*.experts.down", "columns"),
        Row((shared_gate, shared_up), "layers.*.experts.shared.gate_up", "rows"),
        Row((shared_down,), "layers.*.experts.shared.down", "columns"),
    )


def as_stored(table: Table, text: TextConfig, experts: str = "") -> Table:
    """The table of a family with one tensor for a layer's experts, adapted to files that hold experts separately.

    Quantisers write such files: they split the tensor into a linear layer per matrix, with the names of most families.
    experts: the module with the experts, if it differs from the family's table.
    """
    if not any(layer.experts and layer.experts.layout == "apart" for layer in text.layers):
        return table
    first = ("gate_proj", "up_proj") if text.gated_mlp else ("up_proj",)
    pieces = {"layers.*.experts.gate_up": first, "layers.*.experts.down": ("down_proj",)}
    rows = (
        replace(row, names=tuple(f"{experts or row.names[0]}.#.{name}" for name in pieces[row.target]))
        if row.target in pieces
        else row
        for row in table.rows
    )
    return replace(table, rows=tuple(rows))


class Sparse(Llama):
    """Llama's layers with experts and the usual names: `mlp.experts.N.gate_proj`, `mlp.gate`."""

    WEIGHTS = Table((*DECODER_ROWS, *sparse_rows()), ignore=DECODER_IGNORE)
