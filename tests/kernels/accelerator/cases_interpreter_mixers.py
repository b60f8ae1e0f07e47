"""DeBERTa's attention in the interpreter against its reference in plain torch."""

import pytest
import torch
import triton  # noqa: F401  (before any kernel file)

from engine.kernels.attention.disentangled import disentangled_attention_reference, launch_disentangled


@pytest.mark.parametrize(("dim", "reach", "dtype"), [(64, 149, torch.float16), (24, 20, torch.float32)])
def test_disentangled_attention(dim, reach, dtype):
    torch.manual_seed(0)
    fused = torch.randn(150, 6, dim).to(dtype)
    pos_k, pos_q = torch.randn(2, 16, 2, dim).to(dtype)
    buckets = (torch.arange(-reach, reach + 1) * 15.9 / (2 * reach) + 7.9).int()
    bounds = torch.tensor([0, 1, 1, 131, 150], dtype=torch.int32)
    parts = (*fused.split(2, 1), pos_k, pos_q)
    want = disentangled_attention_reference(*(part.double() for part in parts), buckets, bounds, 0.2)
    got = launch_disentangled(*parts, buckets, bounds, 0.2).double()
    assert (got - want).norm() / want.norm() < (1e-5 if dtype == torch.float32 else 8e-3)
