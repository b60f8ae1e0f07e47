"""OLMo 2: Llama with norms after attention and MLP instead of before, and norms over whole queries and keys."""

from __future__ import annotations

from engine.base.model_config import TextConfig
from engine.checkpoint.section import Section
from engine.checkpoint.text import every_layer, read_text
from engine.models.base.family import Family
from engine.models.text.llama import DECODER_IGNORE, DECODER_ROWS, Llama
from engine.weights.table import Row, Table

POST_NORM_ROWS = (
    *(row for row in DECODER_ROWS if row.target not in ("layers.*.attention_norm", "layers.*.mlp_norm")),
    Row(("layers.*.post_attention_layernorm",), "layers.*.attention_post_norm"),
    Row(("layers.*.post_feedforward_layernorm",), "layers.*.mlp_post_norm"),
)


class PostNormDecoder(Llama):
    """x + norm(attention(x)), then x + norm(mlp(x))."""

    WEIGHTS = Table(POST_NORM_ROWS, ignore=DECODER_IGNORE)


def text(body: Section, outer: Section) -> TextConfig:
    """The decoder."""
    return every_layer(read_text(body, outer, eps=1e-5, qk_norm="projection"), pre_norms=False, post_norms=True)


FAMILY = Family(name="OLMo 2", architectures=("Olmo2ForCausalLM",), model=PostNormDecoder, text=text)
