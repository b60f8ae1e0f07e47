"""HunYuan dense (v1): Llama with norms of query and key heads after the rotation."""

from __future__ import annotations

from functools import partial

from engine.checkpoint.text import read_text
from engine.models.base.family import Family
from engine.models.text.llama import ATTENTION, DECODER_IGNORE, DECODER_ROWS, Llama
from engine.weights.table import Row, Table

NORMS = {
    "layers.*.attention.q_norm": ATTENTION + "query_layernorm",
    "layers.*.attention.k_norm": ATTENTION + "key_layernorm",
}


class HunYuanDense(Llama):
    """Llama's layers with other weight names."""

    WEIGHTS = Table(
        tuple(Row((NORMS[row.target],), row.target) if row.target in NORMS else row for row in DECODER_ROWS),
        ignore=DECODER_IGNORE,
    )


FAMILY = Family(
    name="HunYuan dense",
    architectures=("HunYuanDenseV1ForCausalLM",),
    model=HunYuanDense,
    text=partial(read_text, eps=1e-5, qk_norm="head after rotation"),
)
