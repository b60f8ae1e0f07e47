"""Towers and connectors with adapters: the answers of a checkpoint into which the adapter is merged."""

import asyncio
import functools
from dataclasses import replace
from pathlib import Path

import pytest

from engine.base.config import LoraConfig
from tests import tiny
from tests.engine_kit import answer, running
from tests.invariance.test_seeing import request
from tests.lora_kit import Drawn, adapted, drawn, merged

CASES = [("paligemma", "host"), ("internvl", "host"), ("qwen2_vl", "host"), ("paligemma", "device")]
MIXES = ("picture", "two pictures")


@functools.cache
def adapters(name: str) -> tuple[Drawn | None, ...]:
    """The base, an adapter of everything, another one, and one of the decoder only."""
    folder = tiny.checkpoint(name)
    return (
        None,
        drawn(folder, 4, 1, scale=0.2),
        drawn(folder, 3, 2, scale=0.2),
        drawn(folder, 4, 3, ("gate_proj",), 0.3),
    )


@functools.cache
def wanted(name: str, room: Path) -> list[list[list[list[int]]]]:
    """By adapter and mix: the tokens from the merged checkpoint."""

    async def run() -> list[list[list[list[int]]]]:
        found = []
        for number, each in enumerate(adapters(name)):
            folder = tiny.checkpoint(name)
            if each is not None:
                folder = merged(folder, each, room / f"{name}-{number}")
            async with running(folder) as engine:
                found.append([await answer(engine, request(name, mix)) for mix in MIXES])
        return found

    return asyncio.run(run())


@pytest.fixture(scope="module")
def room(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("merged")


@pytest.mark.parametrize(("name", "backend"), CASES, indirect=["backend"])
async def test_pictures_with_adapters_equal_merged_weights(name, backend, room):
    want = await asyncio.to_thread(wanted, name, room)
    one, other, text = (each.adapter for each in adapters(name)[1:])
    assert (one.in_towers, other.in_towers, text.in_towers) == (True, True, False)
    async with running(tiny.checkpoint(name), lora=LoraConfig(max_loras=2)) as engine:
        for _ in range(2):
            jobs = [answer(engine, adapted(request(name, mix), each)) for each in adapters(name) for mix in MIXES]
            got = await asyncio.gather(*jobs)
            assert got == [tokens for each in want for tokens in each]


async def test_adapters_of_the_decoder_share_the_rows_of_pictures_with_the_base():
    base, both, _, text = adapters("paligemma")
    asked = request("paligemma", "picture")
    async with running(tiny.checkpoint("paligemma"), lora=LoraConfig(max_loras=3)) as engine:

        async def encodes(drawn: Drawn | None) -> int:
            await answer(engine, adapted(asked, drawn))
            return await engine.on_device(lambda runtime: runtime.media.encoder.clock.calls)

        calls = [await encodes(each) for each in (base, text, both, both, replace_hash(both))]
    assert [after - calls[0] for after in calls] == [0, 0, 1, 1, 2]


def replace_hash(drawn: Drawn) -> Drawn:
    """An adapter with the same matrices and another hash."""
    return drawn._replace(adapter=replace(drawn.adapter, sha256=bytes(32)))
