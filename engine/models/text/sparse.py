"""Sparse: Llama's layers with experts in some of them, and the rows by which checkpoints name their parts.

Thread: device. A family with experts says in its `text` which layers have them (engine/checkpoint/experts).
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
    """Of a layer with experts, one module for each of an expert's matrices.

    block: in front of all other names. names: an expert's gate, up and down. correction: the module that holds it.
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
    """The table of a family that keeps a layer's experts in one tensor, for files that hold them one by one.

    Quantisers do so: they turn the tensor into a linear layer for each matrix, and name these as most families do.
    experts: the module that has them, where the family's table names another.
    """
    if not any(layer.experts and layer.experts.layout == "apart" for layer in text.layers):
        return table
    pieces = {"layers.*.experts.gate_up": ("gate_proj", "up_proj"), "layers.*.experts.down": ("down_proj",)}
    rows = (
        replace(row, names=tuple(f"{experts or row.names[0]}.#.{name}" for name in pieces[row.target]))
        if row.target in pieces
        else row
        for row in table.rows
    )
    return replace(table, rows=tuple(rows))


class Sparse(Llama):
    """Names as Qwen and most families have them: `mlp.experts.N.gate_proj`, `mlp.gate`."""

    WEIGHTS = Table((*DECODER_ROWS, *sparse_rows()), ignore=DECODER_IGNORE)
