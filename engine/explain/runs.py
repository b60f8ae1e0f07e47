"""Runs a model in steps of 1, 32 and 2,048 tokens, and its towers on one item, and records the launches.

Thread: any; the model belongs to the caller. In: a model whose parts are filled, with real weights or with tensors
without memory, and an entered Launches. Out: the launches of one forward with its head, by step size; and the
launches of a tower, by modality.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from engine.cache.layout import CacheLayout
from engine.encoders.tower import each
from engine.explain.launches import Launch, Launches
from engine.explain.pretence import Pretence
from engine.explain.steps import batch_of, decoding, prompts
from engine.kernels.gemm.pack import Placement
from engine.layers.batch import Batch
from engine.models.base.model import Model
from engine.weights.table import parts_of

SIZES = (1, 32, 2048)  # tokens
DECODED = 32  # a step of more tokens is a prompt


def fill(model: Model, tensors: Pretence, placement: Placement, is_run: Callable[[object], bool]) -> None:
    """Fills the parts that pass `is_run` with tensors without memory, in the dtypes of the checkpoint."""
    saved = model.config.torch_dtype
    for _, _, part in parts_of(model.weight_table(), model):
        expected = part.expects() if is_run(part) else {}
        if expected:  # a part without own tensors reads another part's
            made: dict[str, list[Tensor | None]] = {
                kind: [None if one is None else tensors.tensor(one.shape, one.saved_as(saved)) for one in pieces]
                for kind, pieces in expected.items()
            }
            part.fill(made, placement)


@torch.no_grad()
def steps_of(
    model: Model, layout: CacheLayout, device: str, launches: Launches, invariant: bool = False
) -> dict[int, list[Launch]]:
    """Tokens of a step -> its launches. Up to DECODED tokens are one decoded token per row, more are a prompt; a
    pooling model's steps are always prompts. `invariant`: as with --deterministic."""
    found = {}
    for tokens in SIZES:
        longest = model.config.max_model_len or model.config.max_position
        rows = prompts(tokens, longest) if tokens > DECODED or model.pooler is not None else decoding(tokens)
        batch = batch_of(model, layout, rows, device, invariant)
        found[tokens] = launches.of(partial(_step, model, batch, rows.count))
    return found


@torch.no_grad()
def towers_of(model: Model, launches: Launches) -> dict[str, dict[int, list[Launch]]]:
    """Modality -> rows -> launches for one item of about as many rows."""
    return {
        tower.modalities[0]: {
            rows: launches.of(partial(tower.encode, tower.example(tower.modalities[0], rows))) for rows in SIZES
        }
        for tower in each(model.towers)
    }


def _step(model: Model, batch: Batch, rows: int) -> None:
    if model.pooler is not None:
        model.pooler.lines(batch, rows, model.forward)
        return
    model.logits(model.forward(batch))
