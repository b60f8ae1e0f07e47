"""A decoder of transformers that gets rows in place of placeholder tokens, for towers without a class in transformers.

The tower's formulas are in the family's own file of this folder. Greedy tokens and logits of the whole are computed in
float32 from the decoder's embeddings and the tower's rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def drawn(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """Random tensors by name: vectors of norms near 1, small biases, matrices that preserve magnitudes."""
    draw, made = torch.Generator().manual_seed(seed), {}
    for name, shape in shapes.items():
        tensor = torch.randn(shape, generator=draw)
        if len(shape) == 1:
            made[name] = 0.1 * tensor + float(name.endswith("weight"))
        else:
            made[name] = 1.2 * tensor * torch.Size(shape[1:]).numel() ** -0.5
    return made


class Held:
    """The tensors of a tower, and the layers that use them by name."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def product(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.tensors[name + ".weight"], self.tensors.get(name + ".bias"))

    def norm(self, name: str, x: Tensor, eps: float) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.tensors[name + ".weight"], self.tensors[name + ".bias"], eps)

    def rms_norm(self, name: str, x: Tensor, eps: float) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * self.tensors[name + ".weight"]


def embedded(decoder: Any, tokens: Sequence[int], mark: int, rows: Tensor) -> Tensor:
    """Embeddings of the tokens, [1, T, hidden]; the `mark` tokens get the rows [marks, hidden] in order."""
    ids = torch.tensor(tokens)
    x = decoder.get_input_embeddings()(ids).detach().clone()
    x[ids == mark] = rows
    return x[None]


@torch.inference_mode()
def logits(decoder: Any, x: Tensor) -> Tensor:
    """[T, vocabulary]."""
    found: Tensor = decoder(inputs_embeds=x).logits[0]
    return found


@torch.inference_mode()
def greedy(decoder: Any, x: Tensor, count: int) -> list[int]:
    """`count` greedy tokens after x [1, T, hidden]."""
    made = decoder.generate(
        inputs_embeds=x, attention_mask=torch.ones(x.shape[:2]), max_new_tokens=count, min_new_tokens=count,
        do_sample=False, eos_token_id=None,
    )  # fmt: skip
    found: list[int] = made[0, -count:].tolist()
    return found
