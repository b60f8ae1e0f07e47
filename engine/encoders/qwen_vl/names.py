"""Names of the parts of Qwen's vision tower in each generation's checkpoints; rows for a model's WEIGHTS. Frozen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from engine.weights.table import Row


@dataclass(frozen=True, slots=True)
class Names:
    """Names of the modules of a block and of a merger, relative to the block or merger."""

    qkv: tuple[str, ...] = ("attn.qkv",)
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    merger: tuple[str, str, str] = ("ln_q", "mlp.0", "mlp.2")  # the norm, the two linear layers
    deep_mergers: str = "deepstack_merger_list"


QWEN2 = Names(up=("mlp.fc1",), down="mlp.fc2")
QWEN2_5 = Names()
OMNI = Names(qkv=("attn.q", "attn.k", "attn.v"))
QWEN3 = Names(up=("mlp.linear_fc1",), down="mlp.linear_fc2", merger=("norm", "linear_fc1", "linear_fc2"))
QWEN3_OMNI = Names(up=("mlp.linear_fc1",), down="mlp.linear_fc2", deep_mergers="merger_list")


def rows(model: str, module: str, names: Names) -> tuple[Row, ...]:
    """Weight rows of the model's attribute `model`, called `module` in checkpoints."""
    block, target = f"{module}.blocks.*.", f"{model}.blocks.*."
    return (
        Row((f"{module}.patch_embed.proj",), f"{model}.patch_embed"),
        Row((f"{module}.pos_embed",), f"{model}.positions"),
        Row((block + "norm1",), target + "norm1"),
        Row(tuple(block + piece for piece in names.qkv), target + "qkv"),
        Row((block + "attn.proj",), target + "proj"),
        Row((block + "norm2",), target + "norm2"),
        Row(tuple(block + piece for piece in names.up), target + "mlp.up"),
        Row((block + names.down,), target + "mlp.down"),
        *_merger(f"{model}.merger", f"{module}.merger", names),
        *_merger(f"{model}.deep_mergers.*", f"{module}.{names.deep_mergers}.*", names),
    )


def _merger(model: str, module: str, names: Names) -> Iterator[Row]:
    for name, part in zip(names.merger, ("norm", "inner", "outer")):
        yield Row((f"{module}.{name}",), f"{model}.{part}")
