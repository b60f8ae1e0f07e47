"""A bare torch decode loop of a Qwen3-shaped model: the reference that `make bench` divides by.

No server, no scheduler, no paging: static caches, one batch, greedy. It shows the speed of torch's own operators, used
carefully, on the same machine in the same minute.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F


class TorchLoop:
    """Random weights of the given config; `run` decodes a batch and returns tokens per second."""

    def __init__(self, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.heads, self.kv_heads, self.dim = (
            config["num_attention_heads"],
            config["num_key_value_heads"],
            config["head_dim"],
        )
        width = (self.heads + 2 * self.kv_heads) * self.dim

        def weight(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns) * 0.02

        self.layers = [
            {
                "qkv": weight(width, hidden),
                "o": weight(hidden, self.heads * self.dim),
                "gate_up": weight(2 * inner, hidden),
                "down": weight(hidden, inner),
            }
            for _ in range(config["num_hidden_layers"])
        ]
        self.embed = weight(config["vocab_size"], hidden)
        self.head = weight(config["vocab_size"], hidden)
        self.ones = torch.ones(hidden)
        self.head_ones = torch.ones(self.dim)
        self.inv_freq = config["rope_theta"] ** (-torch.arange(0, self.dim, 2) / self.dim)

    def run(self, batch: int, prompt_len: int, new_tokens: int) -> tuple[float, float]:
        """(output tokens per second, seconds to the first token) for `batch` equal prompts."""
        length = prompt_len + new_tokens
        self.keys = [torch.zeros(batch, self.kv_heads, length, self.dim) for _ in self.layers]
        self.values = [torch.zeros_like(keys) for keys in self.keys]
        ids = torch.randint(0, self.embed.shape[0], (batch, prompt_len))
        with torch.inference_mode():
            begun = time.perf_counter()
            token = self._forward(ids, 0)
            first = time.perf_counter() - begun
            for step in range(new_tokens - 1):
                token = self._forward(token[:, None], prompt_len + step)
            took = time.perf_counter() - begun
        return batch * new_tokens / took, first

    def _rope(self, x: torch.Tensor, start: int) -> torch.Tensor:
        angles = torch.arange(start, start + x.shape[2])[:, None] * self.inv_freq
        cos, sin = angles.cos(), angles.sin()
        low, high = x.chunk(2, dim=-1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)

    def _forward(self, ids: torch.Tensor, start: int) -> torch.Tensor:
        batch, count = ids.shape
        x = self.embed[ids]
        end = start + count
        groups = self.heads // self.kv_heads
        for layer, keys, values in zip(self.layers, self.keys, self.values, strict=True):
            normed = F.rms_norm(x, (x.shape[-1],), self.ones, 1e-6)
            qkv = F.linear(normed, layer["qkv"]).view(batch, count, -1, self.dim).transpose(1, 2)
            q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
            q = self._rope(F.rms_norm(q, (self.dim,), self.head_ones, 1e-6), start)
            keys[:, :, start:end] = self._rope(F.rms_norm(k, (self.dim,), self.head_ones, 1e-6), start)
            values[:, :, start:end] = v
            if count == 1:  # the query heads of a KV head become rows of one product
                grouped = q.view(batch, self.kv_heads, groups, self.dim)
                out = F.scaled_dot_product_attention(grouped, keys[:, :, :end], values[:, :, :end])
                out = out.reshape(batch, 1, -1)
            else:
                out = F.scaled_dot_product_attention(
                    q, keys[:, :, :end], values[:, :, :end], is_causal=True, enable_gqa=True
                )
                out = out.transpose(1, 2).reshape(batch, count, -1)
            x = x + F.linear(out, layer["o"])
            gate, up = F.linear(F.rms_norm(x, (x.shape[-1],), self.ones, 1e-6), layer["gate_up"]).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, layer["down"])
        last = F.rms_norm(x[:, -1], (x.shape[-1],), self.ones, 1e-6)
        return F.linear(last, self.head).argmax(dim=-1)
