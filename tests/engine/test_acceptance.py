"""One warning if the first drafts of rows are rarely right."""

import logging

import numpy as np
import pytest

from engine.base.stats import DraftCounts
from engine.run import acceptance
from engine.run.acceptance import DRAFTS, AcceptanceWatch
from tests import tiny
from tests.engine.test_drafts import collected, ngram
from tests.engine_kit import running, text_request


def counts(drafts: int, right: int) -> DraftCounts:
    return DraftCounts(drafts, 3 * drafts, right, accepted_per_place=(right,) if right else ())


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "speculative decoding" in record.getMessage()]


def test_a_thousand_drafts_are_needed_and_one_warning_is_enough(caplog):
    watch = AcceptanceWatch()
    watch.look(counts(DRAFTS - 1, 0))
    assert not warnings(caplog)
    watch.look(counts(DRAFTS, DRAFTS // 10))
    assert [line.partition(";")[0] for line in warnings(caplog)] == [
        "speculative decoding: the first draft was right in 10.0 % of 1000 verified rows"
    ]
    watch.look(counts(9 * DRAFTS, 0))
    assert len(warnings(caplog)) == 1


def test_each_thousand_is_looked_at_by_itself(caplog):
    watch = AcceptanceWatch()
    watch.look(counts(DRAFTS, DRAFTS))
    watch.look(counts(2 * DRAFTS, DRAFTS + DRAFTS // 4))
    assert not warnings(caplog)
    watch.look(counts(3 * DRAFTS, DRAFTS + DRAFTS // 4))
    assert len(warnings(caplog)) == 1


@pytest.mark.parametrize(("least", "lines"), [(0.0, 0), (1.1, 1)])
async def test_an_engine_looks_at_its_drafts(least, lines, monkeypatch, caplog):
    monkeypatch.setattr(acceptance, "DRAFTS", 5)
    monkeypatch.setattr(acceptance, "LEAST", least)
    caplog.set_level(logging.WARNING)
    ids = np.tile(np.arange(5, 12), 5).astype(np.int32)
    async with running(tiny.checkpoint("qwen3"), speculative=ngram(3)) as own:
        await collected(own, [text_request(ids, 40, ignore_eos=True, allowed_token_ids=(5, 9))])
        assert own.stats.drafts.drafts >= 5
    assert len(warnings(caplog)) == lines
