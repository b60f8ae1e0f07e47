"""Random weights of the right shapes (--load-format dummy): only config.json is needed.

Each tensor has its own generator, seeded by its name and the given seed, so the values depend neither on the order of
loading nor on other tensors. They are drawn on the device, where they will stay; another kind of device draws others.
Norm weights lie around 1, so that activations keep their size through the layers. Codes have both signs: where all are
positive the rows of a batch grow alike, and choose the same experts.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

STD = 0.02
SCALE = 2.0**-9
LARGEST = ("absmax", "SCB")  # scales by other names
BITS, SIGN = 0x20, 0x80  # of e4m3: from 1/8 to 2 in 32 steps, and its sign
POWERS = 118, 122  # of two, 127 added


def draw(name: str, tensor: Tensor, seed: int) -> Tensor:
    """Fills `tensor`: normal, standard deviation 0.02, around 1 where the name says it is a norm's weight."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
    generator = torch.Generator(device=tensor.device)
    generator.manual_seed(int.from_bytes(digest, "little"))
    module, _, kind = name.rpartition(".")
    if tensor.dtype == torch.float8_e4m3fn:
        signs = 1 if "scale" in kind else 2
        codes = tensor.view(torch.uint8).random_(0, signs * BITS, generator=generator)
        codes += BITS + codes.div(BITS, rounding_mode="floor").mul_(SIGN - BITS)
        return tensor
    if "scale" in kind and tensor.dtype in (torch.uint8, torch.float8_e8m0fnu):
        tensor.view(torch.uint8).random_(*POWERS, generator=generator)
        return tensor
    if not tensor.is_floating_point():  # codes of quantised weights
        limits = torch.iinfo(tensor.dtype)
        return tensor.random_(limits.min, limits.max, generator=generator)
    if "scale" in kind or kind in LARGEST:
        return tensor.uniform_(SCALE, 2 * SCALE, generator=generator)
    tensor.normal_(0.0, STD, generator=generator)
    if kind == "weight" and is_norm(module):
        tensor += 1.0
    return tensor


def is_norm(module: str) -> bool:
    """Whether a module of that name normalises: by the last component, as the checkpoints at hand name them."""
    last = module.rpartition(".")[2].lower()
    return "norm" in last or last.startswith("ln_")
