"""ERNIE 4.5 VL: ERNIE 4.5's decoder with three position axes and experts of media, and a tower with a resampler.

Thread: device. The pairs of a head are rotated by height and by width in turns; the last pairs are rotated by time.
A layer has two groups of experts: the tokens of pictures and films, with the tokens around them, use the second group
(engine/layers/media_experts).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from engine.base.errors import ConfigError
from engine.base.model_config import LayerConfig, ModelConfig, TextConfig
from engine.checkpoint.experts import read_experts, with_experts
from engine.checkpoint.rope import RopeDefaults
from engine.checkpoint.section import Section
from engine.checkpoint.text import read_text, refuse
from engine.encoders.ernie_vl import ROWS, ErnieVisionConfig, ErnieVisionTower, read_vision
from engine.encoders.tower import by_modality
from engine.layers.batch import Batch
from engine.layers.media_experts import MediaExperts, MediaTokens
from engine.layers.norm import Norm
from engine.layers.rope import Rope
from engine.layers.stream import Addend, Stream
from engine.models.base.decoder import Caches, DecoderLayer, Metas
from engine.models.base.family import Family
from engine.models.text.llama import DECODER_IGNORE, DECODER_ROWS, Llama, LlamaLayer
from engine.models.text.sparse import sparse_rows
from engine.weights.table import Row, Table

# Keys of config.json for the tokens that use the experts of media, and the values of the published models.
MEDIA_TOKENS = {
    "image_token_id": 100_295, "image_start_token_id": 101_304, "image_end_token_id": 101_305,
    "video_token_id": 103_367, "video_start_token_id": 101_306, "video_end_token_id": 101_307,
}  # fmt: skip
MLP = "layers.*.mlp."
PAIR = MLP + "experts.#."
EXPERT_ROWS = (
    *(row for row in sparse_rows() if not row.target.endswith("correction")),
    Row((MLP + "gate",), "layers.*.groups.media.router"),
    Row((MLP + "moe_statics",), "layers.*.groups.corrections"),
    Row((PAIR + "gate_proj", PAIR + "up_proj"), "layers.*.groups.media.gate_up", "rows"),
    Row((PAIR + "down_proj",), "layers.*.groups.media.down", "columns"),
)


class ErnieLayer(LlamaLayer):
    """Llama's layer, or one with two groups of experts."""

    is_dealt = True

    def __init__(self, text: TextConfig, layer: LayerConfig, tokens: MediaTokens) -> None:
        super().__init__(text, layer)
        self.tokens = tokens
        self.groups: MediaExperts | None = None
        if layer.experts is not None:
            self.groups = MediaExperts(text, layer.experts, tokens)
            self.experts = self.groups.text

    def __call__(self, x: Stream, rope: Rope, metas: Metas, caches: Caches, index: Tensor | None) -> None:
        if index is not None:
            self.tokens.keep(index)
        super().__call__(x, rope, metas, caches, index)

    def fed(self, x: Stream, norm: Norm | None) -> Addend:
        return super().fed(x, norm) if self.groups is None else self.groups(x.normed(norm), x.count, x.capture)


class Ernie45VL(Llama):
    """Text, pictures and films in; text out."""

    WEIGHTS = Table(
        (*DECODER_ROWS, *EXPERT_ROWS, *ROWS),
        prefixes=("model.", "language_model."),
        ignore=(*DECODER_IGNORE, "mtp_*", "layers.*.mtp_*"),
    )

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        self.media_tokens = MediaTokens(list(config.media_token_ids.values()), device)
        super().__init__(config, dtype, device)
        vision = config.towers.get("vision")
        self.vision = ErnieVisionTower(vision, dtype, device) if isinstance(vision, ErnieVisionConfig) else None
        self.towers = by_modality(self.vision)

    def layer(self, number: int) -> DecoderLayer:
        return ErnieLayer(self.config.text, self.config.text.layers[number], self.media_tokens)

    def embedded(self, batch: Batch) -> Tensor:
        self.media_tokens.begin(batch.token_ids)
        return super().embedded(batch)


def media_token_ids(outer: Section) -> dict[str, int]:
    """The ids of the tokens that use the experts of media: of an item, and of its beginning and end."""
    return {key.removesuffix("_token_id"): outer.integer(key, default) for key, default in MEDIA_TOKENS.items()}


def text(body: Section, outer: Section) -> TextConfig:
    """The decoder's config; the widths of the experts of text and of media are one list."""
    refuse(body, use_bias=False)
    rope = RopeDefaults(500_000.0, sections=(22, 22, 20), interleaved=True)
    read = read_text(body, outer, rope=rope, tied=True, eps=1e-5)
    sections = read.layers[0].rope.mrope_section
    if sections[0] != sections[1]:
        raise ConfigError(f"{body.path}: mrope_section={list(sections)} must have equal numbers of height and width")
    layers = tuple(replace(layer, rope=replace(layer.rope, mrope_turns="sides")) for layer in read.layers)
    read = replace(read, layers=layers)
    widths = body.items("moe_intermediate_size", (1536, 512))
    if len(widths) != 2:
        raise ConfigError(f"{body.path}: moe_intermediate_size={list(widths)} must be two widths: of text and of media")
    kinds = body.items("mlp_layer_types", ["dense"] + ["sparse"] * (len(layers) - 1))
    if len(kinds) != len(layers) or not {*kinds} <= {"dense", "sparse"}:
        raise ConfigError(f"{body.path}: mlp_layer_types must say 'dense' or 'sparse' of each of {len(layers)} layers")
    first = Section({**body.values, "moe_intermediate_size": widths[0]}, body.path, body.outer)
    experts = read_experts(
        first,
        chosen="moe_k",
        correction=True,
        norm_topk_prob=True,
        least_sum=body.number("moe_norm_min", 1e-12),
        shared_width=first.size("moe_intermediate_size") * body.integer("moe_num_shared_experts", 2),
        media_width=Section({"moe_intermediate_size": widths[1]}, body.path).size("moe_intermediate_size"),
    )
    return with_experts(read, experts, [number for number, kind in enumerate(kinds) if kind == "sparse"])


FAMILY = Family(
    name="ERNIE 4.5 VL",
    architectures=("Ernie4_5_VLMoeForConditionalGeneration", "Ernie4_5_VL_MoeForConditionalGeneration"),
    model=Ernie45VL,
    text=text,
    towers={"vision": read_vision},
    processor="ernie_vl:ErnieVL",
    media_token_ids=media_token_ids,
)
