"""Random weights of the right shapes (--load-format dummy): only config.json is needed.

Each tensor has its own generator, seeded by its name and the given seed, so values depend neither on the order of
loading nor on other tensors. Values are drawn on the target device; different kinds of devices draw different values.
Norm weights are around 1, so that activations do not grow or shrink through the layers. Codes have both signs: with
only positive codes, all rows of a batch would become similar and choose the same experts.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

STD = 0.02
SCALE = 2.0**-9
LARGEST = ("absmax", "SCB")  # further names of scales
BITS, SIGN = 0x20, 0x80  # e4m3 codes: 32 codes from 1/8 to 2, and the sign bit
POWERS = 118, 122  # range of exponents of powers of two, biased by 127


def draw(name: str, tensor: Tensor, seed: int) -> Tensor:
    """Fills `tensor` with a normal distribution of standard deviation 0.02 around 0, or around 1 for a norm's
    weight."""
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
    if tensor.dtype == torch.int64:  # a map of tokens, relative to their own numbers
        return tensor.zero_()
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
    """Whether a module is a norm, judged by the last component of its name."""
    last = module.rpartition(".")[2].lower()
    return "norm" in last or last.startswith("ln_")
