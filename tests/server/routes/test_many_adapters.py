"""Many adapters through few places: every answer is right, whatever else runs, leaves, or is loaded meanwhile."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.lora.config import CONFIG
from engine.weights.files import ADAPTER
from server.app import make_app
from tests import tiny
from tests.server.asgi import Client
from tests.server.conftest import config_of, quiet, ready

pytestmark = pytest.mark.asyncio(loop_scope="session")
PROMPT = [5, 40, 41, 42, 7, 99, 100, 3]
AT_ONCE = 48


def draw(folder: Path, seed: int) -> None:
    """An adapter of the queries' and values' projections, with random matrices of rank 1 to 4."""
    drawn, rank = torch.Generator().manual_seed(seed), 1 + seed % 4
    tensors = {}
    for layer in range(3):
        for module, rows in (("q_proj", 128), ("v_proj", 64)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, 64, generator=drawn)
            tensors[f"{name}.lora_B.weight"] = torch.randn(rows, rank, generator=drawn) * 0.3
    folder.mkdir(parents=True)
    save_file(tensors, folder / ADAPTER)
    (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))


@pytest.mark.parametrize(("count", "requests"), [(12, 80), pytest.param(1000, 10_000, marks=pytest.mark.full)])
async def test_answers_are_right_while_others_leave(tmp_path, count, requests):
    for seed in range(count):
        draw(tmp_path / str(seed), seed)
    lora = {"enable_lora": True, "lora_dir": str(tmp_path), "max_loras": 8, "max_cpu_loras": 64}
    model, rows = {"model": str(tiny.checkpoint("qwen3")), "num_threads": 1}, {"max_num_seqs": 16}
    async with ready(config_of(model=model, lora=lora, scheduler={**rows, "max_num_queued_reqs": 256})) as state:
        client, turns, drawn = Client(make_app(state)), asyncio.Semaphore(AT_ONCE), random.Random(0)
        body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        found: dict[int, set[str]] = {}

        async def ask(number: int, leaves: bool) -> None:
            async with turns:
                call = client.call("POST", "/v1/completions", body | {"model": str(number)})
                if leaves:
                    call.start()
                    await asyncio.sleep(0)
                    call.leave()
                    await asyncio.wait([call.task])
                    return
                answer = await call.finish(30)
                assert answer.status == 200, answer.content
                found.setdefault(number, set()).add(str(answer.json()["choices"][0]["token_ids"]))

        asked = [(drawn.randrange(count), drawn.random() < 0.2) for _ in range(requests)]
        await asyncio.gather(*(ask(*each) for each in asked))
        during, found = found, {}
        for number in sorted(during)[:100]:
            await ask(number, leaves=False)
        assert all(len(answers) == 1 for answers in during.values())
        assert all(during[number] == answers for number, answers in found.items())
        assert len({str(answers) for answers in during.values()}) > len(during) / 2
        held = await quiet(state)
        assert {held[name] for name in ("adapter_rows", "backlog", "flows")} == {0}
        assert state.ledger()["adapter_loads"] == 0
