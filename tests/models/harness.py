"""A paged cache without an engine: runs model.forward on hand-made Batches, whole, in chunks, or several rows mixed.

Blocks are handed out in shuffled order, so that a model that mistakes block numbers for positions gets wrong results.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.attention.meta import AttentionMeta
from engine.base.bidirectional import last_keys
from engine.checkpoint.config import resolve_dtype
from engine.layers.batch import Batch
from engine.layers.states import Recurrent
from engine.models.base.model import Model
from engine.models.registry import build_model, load_model_config
from engine.quant.online import requested
from engine.weights.files import open_checkpoint
from engine.weights.load import load_weights
from tests.models.state_room import Held, StateRoom

BLOCK = 16


def load(folder, dtype: str = "auto", load_format: str = "auto", seed: int = 0, quantization: str = "") -> Model:
    """A model with its weights, loaded from its folder as the server loads it."""
    config = requested(load_model_config(folder), quantization)
    activations = resolve_dtype(config, dtype, "cpu")
    model = build_model(config, activations, shards=None if load_format == "dummy" else open_checkpoint(folder))
    load_weights(model, str(folder), load_format, seed=seed)
    return model


def keepers(model: Model) -> list[Any]:
    """By cache: the spec of attention's, or the layer with a state."""
    layers = getattr(getattr(model, "members", [model])[0], "layers", ())  # of rank 0, if there are several
    mixers = [mixer for layer in layers for mixer in getattr(layer, "mixers", ())]
    if not any(isinstance(mixer, Recurrent) for mixer in mixers):
        return model.cache_specs()
    return [mixer if isinstance(mixer, Recurrent) else mixer.cache_spec(model.dtype) for mixer in mixers]


@dataclass
class Sequence:
    """One row: its tokens, how many of them are in the cache, and its blocks."""

    tokens: list[int]
    blocks: list[int]
    states: Held
    positions: Tensor | None = None  # [axes, prompt] for M-RoPE prompts
    delta: int = 0
    media: list[tuple[int, Tensor]] = field(default_factory=list)  # (first position in the prompt, rows)
    bi_spans: np.ndarray | None = None  # int32 [m, 2], for models with bidirectional spans
    computed: int = 0

    def positions_of(self, start: int, end: int, axes: int) -> Tensor:
        """[axes, end - start]; beyond the prompt all axes are index + delta."""
        plain = torch.arange(start, end).expand(axes, -1) + self.delta
        if self.positions is None:
            return plain
        given = self.positions[:, start:end]
        return torch.cat([given, plain[:, given.shape[1] :]], dim=1)


class Harness:
    """A model with caches for a few sequences."""

    def __init__(self, model: Model, max_tokens: int = 512, num_rows: int = 4, seed: int = 0) -> None:
        self.model = model
        self.blocks_each = -(-max_tokens // BLOCK)
        num_blocks = 1 + num_rows * self.blocks_each
        self.caches = []
        self.rooms: list[StateRoom | None] = []  # by cache: of a layer with a state; None: of attention
        self.count = 0  # rows
        for keeper in keepers(model):
            room = StateRoom(keeper, model.dtype, num_rows, seed) if isinstance(keeper, Recurrent) else None
            self.rooms.append(room)
            # Unwritten blocks hold NaN, so that reading beyond the context changes the result.
            if room is None:
                pages = torch.full((num_blocks, keeper.block_bytes(BLOCK)), 0xFF, dtype=torch.uint8)
            self.caches.append((room.pages,) if room else keeper.views(pages, BLOCK))
        self.free = list(range(1, num_blocks))
        random.Random(seed).shuffle(self.free)

    def add(self, tokens: list[int], **rest) -> Sequence:
        """A new sequence with its blocks."""
        blocks, self.free = self.free[: self.blocks_each], self.free[self.blocks_each :]
        made = Sequence(list(tokens), blocks, Held(self.count), **rest)
        self.count, bidirectional = self.count + 1, self.model.config.bidirectional
        if bidirectional:
            spans = [(first, first + len(rows)) for first, rows in made.media]
            made.bi_spans = np.array(
                sorted(spans) if bidirectional == "items" else [(0, len(tokens))], np.int32
            ).reshape(-1, 2)
        return made

    @torch.inference_mode()
    def step(self, *rows: tuple[Sequence, int]) -> Tensor:
        """Computes the next `count` tokens of each (sequence, count); returns their logits [sum of counts, vocab]."""
        return self.model.logits(self.hidden(*rows))

    @torch.inference_mode()
    def hidden(self, *rows: tuple[Sequence, int], asked: list[int] | None = None, out: Tensor | None = None) -> Tensor:
        """Computes a step; returns hidden states [sum of counts, hidden], or those of the tokens `asked`."""
        spans = [(row, row.computed, row.computed + count) for row, count in rows]
        axes = self.model.config.axes
        slots, media, offset = [], [], 0
        for row, start, end in spans:
            slots += [row.blocks[i // BLOCK] * BLOCK + i % BLOCK for i in range(start, end)]
            for first, embedding in row.media:
                low, high = max(first, start), min(first + len(embedding), end)
                if low < high:
                    media.append((offset + low - start, high - low, embedding[low - first : high - first]))
            offset += end - start
        positions = torch.cat([row.positions_of(start, end, axes) for row, start, end in spans], dim=1)
        lengths = [end - start for _, start, end in spans]
        context = [end for _, _, end in spans]
        bi_spans = {number: row.bi_spans for number, (row, _, _) in enumerate(spans) if row.bi_spans is not None}
        starts = np.array([start for _, start, _ in spans])
        seen = last_keys(np.arange(len(spans)), np.array(lengths), starts, bi_spans, self.model.config.bidirectional)
        query_start = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
        meta = AttentionMeta(
            query_start=query_start,
            context_len=torch.tensor(context, dtype=torch.int32),
            block_tables=torch.tensor([row.blocks for row, _, _ in spans], dtype=torch.int32),
            slot_mapping=torch.tensor(slots),
            last_keys=None if seen is None else torch.from_numpy(seen),
        )
        token_ids = torch.tensor([token for row, start, end in spans for token in row.tokens[start:end]])
        positions = positions.contiguous() if axes > 1 else positions[0]
        index = None if asked is None else torch.tensor(asked, dtype=torch.int64)
        chunk = next((keeper.form.chunk for keeper in keepers(self.model) if isinstance(keeper, Recurrent)), 1)
        planned = [row.states.planned(start, end, chunk) for row, start, end in spans]
        metas = [meta if room is None else room.meta(planned, query_start) for room in self.rooms]
        batch = Batch(token_ids, positions, media, metas or [meta], self.caches, range(len(metas)), index)
        for row, _, end in spans:
            row.computed = end
        return self.model.forward(batch, out)

    def prefill(self, row: Sequence, chunk: int = 0) -> Tensor:
        """Computes the whole prompt, in chunks of about `chunk` tokens if given. Returns logits of every token."""
        parts = []
        while row.computed < len(row.tokens):
            left = len(row.tokens) - row.computed
            end = row.computed + min(chunk or left, left)
            for first, behind in () if row.bi_spans is None else row.bi_spans.tolist():
                end = behind if first < end < behind else end
            parts.append(self.step((row, end - row.computed)))
        return torch.cat(parts)

    def generate(self, row: Sequence, count: int, chunk: int = 0) -> list[int]:
        """Greedy tokens after the prompt."""
        logits = self.prefill(row, chunk)
        made = []
        for _ in range(count):
            made.append(int(logits[-1].argmax()))
            row.tokens.append(made[-1])
            logits = self.step((row, 1))
        return made


def generated(model, inputs, count):
    """transformers' next `count` greedy tokens, without stopping at an end token."""
    model.generation_config.eos_token_id = None
    out = model.generate(**inputs, max_new_tokens=count, do_sample=False)
    return out[0, inputs["input_ids"].shape[1] :].tolist()
