"""MPNet (all-mpnet-base-v2, multi-qa-mpnet): BERT without token types, with a bias of scores by the key's distance.

Positions begin after the padding token's row, as in RoBERTa. All layers share the distance biases.
"""

from __future__ import annotations

import torch

from engine.base.model_config import ModelConfig, TextConfig
from engine.checkpoint.section import Section
from engine.checkpoint.text import refuse
from engine.layers.distance import BUCKETS, Buckets
from engine.models.base.encoder import Encoder
from engine.models.base.family import Family
from engine.models.pooling import bert
from engine.models.pooling.classes import ALL, classes
from engine.models.pooling.roberta import IGNORED, first_position, head
from engine.weights.table import Row, Table

LAYER = "encoder.layer.*."
OWN = LAYER + "attention.attn."
ROWS = (
    Row(("embeddings.word_embeddings",), "embed"),
    Row(("embeddings.position_embeddings",), "positions"),
    Row(("embeddings.LayerNorm",), "embed_norm"),
    Row(("encoder.relative_attention_bias",), "distances"),
    Row((OWN + "q", OWN + "k", OWN + "v"), "layers.*.qkv", "rows"),
    Row((OWN + "o",), "layers.*.o", "columns"),
    Row((LAYER + "attention.LayerNorm",), "layers.*.attention_norm"),
    Row((LAYER + "intermediate.dense",), "layers.*.up", "rows"),
    Row((LAYER + "output.dense",), "layers.*.down", "columns"),
    Row((LAYER + "output.LayerNorm",), "layers.*.mlp_norm"),
)


class MPNet(Encoder):
    """An encoder whose positions start after the padding token's row."""

    WEIGHTS = Table(ROWS, prefixes=("mpnet.",), ignore=IGNORED)

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        root = Section(config.raw, "config.json")
        super().__init__(config, dtype, device, types=0, first_position=first_position(root))
        self.distances = Buckets(config.text.num_heads)


def text(body: Section, outer: Section) -> TextConfig:
    """The encoder."""
    refuse(body, relative_attention_num_buckets=BUCKETS)
    return bert.text(body, outer)


FAMILY = Family(
    name="MPNet", architectures=classes("MPNet", *ALL), model=MPNet, text=text, head=head, first_position=first_position
)
