"""Adapters by name of models whose checkpoints have adapters of their own, which a request's media choose."""

import asyncio

import pytest

from engine.base.config import LoraConfig
from engine.base.errors import RequestError
from tests.engine_kit import answer, running
from tests.lora_kit import adapted, drawn, merged
from tests.models.test_adapters import SOUND, TEXTS, each_family, text, wanted_of_text
from tests.models.test_sounds import request, wanted


@pytest.mark.covering(1)
@each_family
async def test_rows_of_both_kinds_and_of_the_base_share_steps(family, backend, tmp_path):
    mine = drawn(family.folder, 4, 1, scale=0.3)
    async with running(merged(family.folder, mine, tmp_path / "merged")) as engine:
        named = [(await answer(engine, text(ids)))[0] for ids in TEXTS]
    texts = [await asyncio.to_thread(wanted_of_text, family, ids) for ids in TEXTS]
    heard = await asyncio.to_thread(wanted, family, SOUND)
    assert sum(one != other for one, other in zip(named, texts)) >= 2
    async with running(family.folder, encoder_cache_tokens=512, lora=LoraConfig(max_loras=2)) as engine:
        for _ in range(2):
            asked = [request(family, SOUND), *map(text, TEXTS), *(adapted(text(ids), mine) for ids in TEXTS)]
            found = await asyncio.gather(*(answer(engine, each) for each in asked))
            assert [tokens for (tokens,) in found] == [heard, *texts, *named]
        with pytest.raises(RequestError, match="adapter of its own"):
            await answer(engine, adapted(request(family, SOUND), mine))
