"""Embeds texts on the CPU with this engine and with transformers, with the same random weights and texts.

    python -m tests.bench.pooling_cpu [--threads 2] [--texts 256] [--tokens 128] [--json FILE]

The shape is that of all-MiniLM-L6: 6 layers of 384, 12 heads, mean pooling. The two sides alternate, three times each.
The table has the median of texts per second, from token ids to vectors on both sides.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from engine import Engine, EngineConfig, Request, SamplingParams
from engine.base.request import PoolingParams
from tests import tiny

TURNS = 3


def checkpoint(folder: Path) -> Path:
    """Random weights of MiniLM's shape."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=30522, hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
    )
    return tiny.save(BertModel(config), folder)


async def ours(folder: Path, inputs: np.ndarray, threads: int) -> list[float]:
    """Texts per second of each turn."""
    pooler = {"pooling_type": "MEAN"}
    engine = Engine(EngineConfig(model=str(folder), device="cpu", num_threads=threads, pooler=pooler))
    await engine.start()
    count, length = inputs.shape
    pooling = PoolingParams(np.arange(count + 1) * length)
    request = Request(inputs.reshape(-1).astype(np.int32), SamplingParams(max_tokens=1), n=count, pooling=pooling)
    found = []
    for _ in range(TURNS):
        begun = time.perf_counter()
        async with engine.submit(request) as stream:
            made = [delta.pooled async for delta in stream]
        assert len(made) == count
        found.append(count / (time.perf_counter() - begun))
    await engine.stop()
    return found


def theirs(folder: Path, inputs: np.ndarray, threads: int) -> list[float]:
    """Texts per second of transformers, called as sentence-transformers calls it: in batches of 32."""
    from transformers import AutoModel

    torch.set_num_threads(threads)
    with tiny.quiet():
        model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    found, ids = [], torch.from_numpy(inputs)
    for _ in range(TURNS):
        begun = time.perf_counter()
        with torch.inference_mode():
            for start in range(0, len(ids), 32):
                part = ids[start : start + 32]
                hidden = model(part, attention_mask=torch.ones_like(part)).last_hidden_state
                torch.nn.functional.normalize(hidden.mean(1), dim=1)
        found.append(len(ids) / (time.perf_counter() - begun))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    inputs = np.random.default_rng(0).integers(0, 30522, (asked.texts, asked.tokens))
    with tempfile.TemporaryDirectory() as made:
        folder = checkpoint(Path(made) / "minilm")
        rates = {
            "omniloop": asyncio.run(ours(folder, inputs, asked.threads)),
            "transformers": theirs(folder, inputs, asked.threads),
        }
    for name, found in rates.items():
        each = ", ".join(f"{rate:.0f}" for rate in found)
        print(f"{name:<22} {statistics.median(found):8.0f} texts/s of {asked.tokens} tokens ({each})")
    if asked.json:
        asked.json.write_text(json.dumps({"settings": {**vars(asked), "json": None}, "texts_per_s": rates}))


if __name__ == "__main__":
    main()
