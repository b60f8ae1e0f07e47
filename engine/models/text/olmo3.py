"""OLMo 3: OLMo 2 with windows in three of four layers; only layers without a window have scaled rotary positions."""

from __future__ import annotations

from engine.base.model_config import TextConfig
from engine.checkpoint.rope import RopeDefaults
from engine.checkpoint.section import Section
from engine.checkpoint.text import every_layer, read_text
from engine.models.base.family import Family
from engine.models.text.olmo2 import PostNormDecoder

ROPE = RopeDefaults(500_000.0, sliding_key="rope_theta", sliding_theta=500_000.0)


def text(body: Section, outer: Section) -> TextConfig:
    """The decoder."""
    read = read_text(body, outer, sliding="layers", pattern=4, rope=ROPE, eps=1e-5, qk_norm="projection")
    return every_layer(read, pre_norms=False, post_norms=True)


FAMILY = Family(name="OLMo 3", architectures=("Olmo3ForCausalLM",), model=PostNormDecoder, text=text)
