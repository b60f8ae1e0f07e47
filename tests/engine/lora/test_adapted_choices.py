"""The base and eight adapters in one batch, with several choices and with grammars: each answers as alone."""

import asyncio
from dataclasses import replace

from engine.base.config import LoraConfig
from tests.engine.test_grammar_rows import FOLDER, JSON, PROMPTS, asked, emitted
from tests.engine_kit import quiet, running
from tests.lora_kit import adapted, drawn


async def test_choices_and_grammars_of_nine_models_in_one_batch(backend):
    models = [None, *(drawn(FOLDER, 1 + seed, seed, scale=0.2) for seed in range(8))]
    free = [adapted(asked(PROMPTS[0], None, 8, ignore_eos=True), each) for each in models]
    requests = [
        *(replace(each, n=2) for each in free),
        *(adapted(asked(PROMPTS[1], JSON), each) for each in models),
    ]
    async with running(FOLDER, lora=LoraConfig(max_loras=8)) as engine:
        alone = [await emitted(engine, each) for each in requests]
        assert await asyncio.gather(*(emitted(engine, each) for each in requests)) == alone
        assert len({str(each) for each in alone[:9]}) == 9
        assert len({str(each) for each in alone[9:]}) > 2
        assert (await quiet(engine))["adapter_rows"] == 0
