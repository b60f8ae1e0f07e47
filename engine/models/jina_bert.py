"""JinaBERT (jina-embeddings-v2-base-en, -small-en, jina-reranker-v1): BERT with GeGLU, and ALiBi for positions.

As https://huggingface.co/jinaai/jina-bert-implementation/blob/main/modeling_bert.py computes it. The models of
jinaai/jina-bert-v2-qk-post-norm (jina-embeddings-v2-base-code, -de, -es, -zh) have further norms and are refused.
"""

from __future__ import annotations

import torch

from engine.checkpoint.section import Section
from engine.checkpoint.text import refuse
from engine.errors import ConfigError
from engine.layers.distance import Slopes
from engine.model_config import ModelConfig, TextConfig
from engine.models.bert import IGNORED, LAYER, SELF, head, post_norm_text
from engine.models.encoder import Encoder
from engine.models.family import Family
from engine.weights.table import Row, Table

ROWS = (
    Row(("embeddings.word_embeddings",), "embed"),
    Row(("embeddings.token_type_embeddings",), "types"),
    Row(("embeddings.LayerNorm",), "embed_norm"),
    Row((SELF + "query", SELF + "key", SELF + "value"), "layers.*.qkv", "rows"),
    Row((LAYER + "attention.output.dense",), "layers.*.o", "columns"),
    Row((LAYER + "attention.output.LayerNorm",), "layers.*.attention_norm"),
    Row((LAYER + "mlp.gated_layers",), "layers.*.up", "rows"),
    Row((LAYER + "mlp.wo",), "layers.*.down", "columns"),
    Row((LAYER + "mlp.layernorm",), "layers.*.mlp_norm"),
)
LONGEST = 1 << 17  # tokens; the slopes' numbers are not in the files, so these do not bound them
OTHER = "qk-post-norm"  # in the name of the code that computes the other models


class JinaBert(Encoder):
    """No table of positions; the slopes reach as far as the longest input."""

    WEIGHTS = Table(ROWS, prefixes=("bert.",), ignore=IGNORED)
    reads_pairs = True

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        types = Section(config.raw, "config.json").size("type_vocab_size", 2)
        super().__init__(config, dtype, device, types, first_position=None)
        longest = config.max_model_len or config.max_position
        self.distances = Slopes(config.text.num_heads, longest, device)


def text(body: Section, outer: Section) -> TextConfig:
    """The encoder."""
    refuse(body, position_embedding_type="alibi", feed_forward_type="geglu", is_decoder=False)
    body.integer("max_position_embeddings", least=2, most=LONGEST)
    if OTHER in str(body.values.get("auto_map")):
        raise ConfigError(
            f"{body.path}: auto_map names {OTHER}: JinaBERT whose queries and keys are normalised is not supported; "
            "supported are jina-embeddings-v2-base-en, -small-en and jina-reranker-v1"
        )
    gelu = Section({**body.values, "hidden_act": "gelu"}, body.path, body.outer)
    return post_norm_text(gelu, None, gated_mlp=True, joined_mlp=True, qkv_bias=True, o_bias=True, mlp_bias=True)


FAMILY = Family(name="JinaBERT", model=JinaBert, text=text, head=head)
