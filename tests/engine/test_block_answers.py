"""Block drafters of every kind, on every path and under pressure: answers are those without drafts."""

from __future__ import annotations

import pytest

from tests import tiny
from tests.engine import test_dflash, test_dflash2, test_dspark
from tests.engine.test_drafter import PROMPTS, TARGET
from tests.engine.test_drafts import PATHS, SETTINGS, compare_answers, on_path, requests_of
from tests.engine_kit import text_request

__all__ = ["on_path"]
DRAFTERS = {
    "dflash": lambda most: test_dflash.asked(most, "sliding"),
    "dflash2": test_dflash2.asked,
    "dspark": test_dspark.asked,
}


@pytest.mark.full
@pytest.mark.parametrize("most", [2, 7])
@pytest.mark.parametrize("settings", SETTINGS, ids=["plain", "chunks", "pressure", "few-rows"])
@pytest.mark.parametrize("on_path", PATHS, indirect=True)
@pytest.mark.parametrize("drafter", DRAFTERS)
async def test_answers_are_those_without_drafts(on_path, drafter, settings, most):
    requests = [*requests_of(most, 6), *(text_request(ids, 30, ignore_eos=True) for ids in PROMPTS[:2])]
    await compare_answers(tiny.checkpoint(TARGET), DRAFTERS[drafter](most), requests, settings)
