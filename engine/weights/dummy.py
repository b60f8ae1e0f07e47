"""Random weights of the right shapes (--load-format dummy): only config.json is needed.

Each tensor has its own generator, seeded by its name and the given seed, so the values depend neither on the order of
loading nor on other tensors. They are drawn on the device, where they will stay; another kind of device draws others.
Norm weights lie around 1, so that activations keep their size through the layers.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

STD = 0.02


def draw(name: str, tensor: Tensor, seed: int) -> Tensor:
    """Fills `tensor`: normal, standard deviation 0.02, around 1 where the name says it is a norm's weight."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
    generator = torch.Generator(device=tensor.device)
    generator.manual_seed(int.from_bytes(digest, "little"))
    if not tensor.is_floating_point():  # codes of quantised weights
        return tensor.random_(0, 128, generator=generator)
    tensor.normal_(0.0, STD, generator=generator)
    module, _, kind = name.rpartition(".")
    if kind == "weight" and is_norm(module):
        tensor += 1.0
    return tensor


def is_norm(module: str) -> bool:
    """Whether a module of that name normalises: by the last component, as the checkpoints at hand name them."""
    last = module.rpartition(".")[2]
    return "norm" in last or last.startswith("ln_")
