"""Whisper: an audio encoder, and a decoder whose layers attend to the text so far and to the encoder's rows.

Thread: device. A prompt begins with the window's rows, one token each, followed by text. In every layer, the KV cache
holds cross-attention's keys and values for a window token, and self-attention's for a text token. So windows are
scheduled, shared by prefix and recomputed like any prompt. Both attentions are paged attention over parts of a row's
block table:

    block table of a row    | window: 94 blocks           | text
    cross-attention reads    0 .. 1499                                    every token is a separate row, whose
    self-attention reads                                    0 .. itself   context is what the token sees

If the host knows which tokens belong to the window, these tokens skip the layers; in a recorded step they pass all
layers, and their results are unused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from engine.attention.meta import AttentionMeta
from engine.base.errors import ConfigError
from engine.base.model_config import ModelConfig, TextConfig
from engine.cache.spec import CacheSpec
from engine.cache.tokens import FullSpec
from engine.checkpoint.rope import no_rope
from engine.checkpoint.section import Section
from engine.checkpoint.text import every_layer, read_text, refuse
from engine.encoders import whisper as encoder
from engine.encoders.sound import EPS
from engine.encoders.tower import by_modality
from engine.encoders.whisper import WhisperAudioConfig, WhisperTower, read_audio
from engine.kernels.attention.work import empty_list, fill_list, max_parts
from engine.layers.batch import Batch
from engine.layers.embed import Embedding, Head, Positions
from engine.layers.norm import LayerNorm
from engine.layers.rope import RopeTable
from engine.models.base.family import Family
from engine.models.base.model import Model
from engine.models.media.whisper_layer import Views, WhisperLayer
from engine.weights.table import Row, Table

LAYER = "decoder.layers.*."
SELF, CROSS = LAYER + "self_attn.", LAYER + "encoder_attn."


class Whisper(Model):
    """Audio in, text out."""

    WEIGHTS = Table(
        rows=(
            *encoder.rows("audio", "encoder"),
            Row(("decoder.embed_tokens",), "embed"),
            Row(("decoder.embed_positions",), "positions"),
            Row((LAYER + "self_attn_layer_norm",), "layers.*.self_norm"),
            Row((SELF + "q_proj", SELF + "k_proj", SELF + "v_proj"), "layers.*.qkv"),
            Row((SELF + "out_proj",), "layers.*.out"),
            Row((LAYER + "encoder_attn_layer_norm",), "layers.*.cross_norm"),
            Row((CROSS + "q_proj",), "layers.*.cross_q"),
            Row((CROSS + "k_proj", CROSS + "v_proj"), "layers.*.cross_kv"),
            Row((CROSS + "out_proj",), "layers.*.cross_out"),
            Row((LAYER + "final_layer_norm",), "layers.*.mlp_norm"),
            Row((LAYER + "fc1",), "layers.*.fc1"),
            Row((LAYER + "fc2",), "layers.*.fc2"),
            Row(("decoder.layer_norm",), "norm"),
        ),
        prefixes=("model.",),
        ignore=("proj_out.weight",),  # a copy of the embedding
    )

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        text, audio = config.text, config.towers.get("audio")
        if not isinstance(audio, WhisperAudioConfig):
            raise ConfigError(
                "Whisper only transcribes audio: serve it without --language-model-only and without audio=0"
            )
        self.config = config
        self.dtype = dtype
        self.device = device
        self.audio = WhisperTower(audio, dtype, device)
        self.towers = by_modality(self.audio)
        self.head = Head(text.vocab_size, text.hidden_size, text.tie_embeddings)
        self.embed = Embedding(text.vocab_size, text.hidden_size, self.head)
        self.positions = Positions(config.max_position - config.encoder_prefix, text.hidden_size)
        self.layers = [WhisperLayer(text) for _ in text.layers]
        self.norm = LayerNorm(text.hidden_size, EPS)
        self._rope = RopeTable(text.layers[0].rope, device, 1)
        self._running = self.layers

    def cache_specs(self) -> list[CacheSpec]:
        text = self.config.text
        return [FullSpec(text.num_heads, text.head_dim, self.dtype) for _ in self.layers]

    @contextmanager
    def abridged(self) -> Iterator[None]:
        """One layer, because all layers launch the same kernels."""
        self._running = self.layers[:1]
        try:
            yield
        finally:
            self._running = self.layers

    def forward(self, batch: Batch, out: Tensor | None = None) -> Tensor:
        if batch.media:
            return self._with_sound(batch, out)
        x = self._decoded(batch, batch.token_ids, batch.positions, None)
        return self.norm(x if batch.sample_index is None else x.index_select(0, batch.sample_index), out)

    def _with_sound(self, batch: Batch, out: Tensor | None) -> Tensor:
        """A step whose window tokens the host knows: it only stores their keys and values; they skip the layers."""
        slots, device = batch.attention[0].slot_mapping, batch.token_ids.device
        is_text = torch.ones(len(batch.token_ids), dtype=torch.bool)
        for start, length, rows in batch.media:
            is_text[start : start + length] = False
            places = slots[start : start + length]
            rope = self._rope(batch.positions[start : start + length])
            for layer, cache in zip(self._running, batch.caches):
                layer.store_sound(rows, rope, cache, places)
        chosen = is_text.nonzero().flatten().to(device)
        wanted = batch.sample_index
        if not len(chosen):
            empty = torch.zeros(len(batch.token_ids), self.config.text.hidden_size, dtype=self.dtype, device=device)
            return empty if wanted is None else empty[:0]
        x = self._decoded(batch, batch.token_ids[chosen], batch.positions[chosen], chosen)
        if wanted is not None:
            return self.norm(x.index_select(0, torch.searchsorted(chosen, wanted)), out)
        whole = x.new_zeros(len(batch.token_ids), x.shape[1])
        whole[chosen] = self.norm(x)
        return whole

    def _decoded(self, batch: Batch, token_ids: Tensor, places: Tensor, chosen: Tensor | None) -> Tensor:
        """The residual stream after the last layer, [T, hidden], for these tokens; `chosen`: their indices in the
        step."""
        views = self._views(batch, places, chosen)
        x = self.embed(token_ids)
        x += self.positions((places - self.config.encoder_prefix).clamp_(0, self.positions.num_positions - 1))
        overlay = batch.overlay if chosen is None else None
        for layer, cache in zip(self._running, batch.caches):
            layer(x, views, cache, overlay)
        return x

    def _views(self, batch: Batch, places: Tensor, chosen: Tensor | None) -> Views:
        """Metadata with every token as a separate row. A window or padding token attends to one key; its result is
        unused."""
        meta, encoder_prefix, keys = batch.attention[0], self.config.encoder_prefix, batch.caches[0][0]
        block_size = keys.shape[2]
        count = len(places)
        numbers = torch.arange(count + 1, dtype=torch.int32, device=places.device)
        lines = torch.searchsorted(
            meta.query_start[1:].contiguous(), numbers[:-1] if chosen is None else chosen.int(), right=True
        ).clamp_(max=len(meta.context_len) - 1)
        if meta.table_row is not None:
            lines = meta.table_row[lines]
        texts = (places - (encoder_prefix - 1)).clamp_(min=1).int()  # text tokens up to and including each token
        sounds = torch.where(places < encoder_prefix, 1, self.audio.config.num_positions).int()
        text = AttentionMeta(
            query_start=numbers,
            context_len=texts,
            block_tables=meta.block_tables[:, encoder_prefix // block_size :].contiguous(),
            slot_mapping=meta.slot_mapping if chosen is None else meta.slot_mapping[chosen],
            table_row=lines.int(),
            decode_only=True,
        )
        sound = replace(text, context_len=sounds, block_tables=meta.block_tables)
        if places.is_cuda:
            text, sound = (self._with_list(view, len(keys), block_size) for view in (text, sound))
        return Views(text, sound, self._rope(places))

    def _with_list(self, view: AttentionMeta, num_blocks: int, block_size: int) -> AttentionMeta:
        """A view with a new work list, sized by the step's tokens; inside a graph the list belongs to the graph."""
        count, text = len(view.context_len), self.config.text
        parts = max_parts(num_blocks, block_size, count)
        work = empty_list(count, count, parts, text.num_heads, text.head_dim, view.context_len.device)
        fill_list(work, view, 1)
        return replace(view, work=work)

    def logits(self, hidden: Tensor, adapters: Tensor | None = None) -> Tensor:
        return self.head(hidden)


def text(body: Section, outer: Section) -> TextConfig:
    """The decoder."""
    refuse(body, scale_embedding=False, is_encoder_decoder=True)
    read = read_text(body, outer, tied=True, activation="gelu", eps=EPS, qkv_bias=True, o_bias=True, layer_norm=True)
    return every_layer(read, rope=no_rope(read.head_dim))


KEYS = {
    "d_model": "hidden_size",
    "decoder_layers": "num_hidden_layers",
    "decoder_attention_heads": "num_attention_heads",
    "decoder_ffn_dim": "intermediate_size",
    "activation_function": "hidden_act",
    "max_target_positions": "max_position_embeddings",
}
FAMILY = Family(
    name="Whisper",
    architectures=("WhisperForConditionalGeneration",),
    model=Whisper,
    text=text,
    towers={"audio": read_audio},
    processor="whisper:Whisper",
    keys=KEYS,
    encoder_prefix=lambda outer: read_audio(outer).num_rows,
)
