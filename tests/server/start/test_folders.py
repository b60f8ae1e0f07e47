"""The beginning of a start: the loop stays free, and a stop that came earlier ends the start before any work."""

from __future__ import annotations

import sys

import pytest

from engine.base.errors import ConfigError
from server.start import folders
from server.start.lifespan import Lifespan
from server.state import AppState
from tests import tiny
from tests.server.conftest import config_of

MODEL = str(tiny.checkpoint("qwen3"))


async def test_local_folders_need_no_module_of_the_hub(monkeypatch):
    """It imports torch, which would hold the loop for seconds: probes and signals would wait."""
    monkeypatch.setitem(sys.modules, "server.start.hub", None)  # an import raises ImportError
    drafts = {"speculative_config": {"model": MODEL, "num_speculative_tokens": 1}}
    state = AppState(config_of(model={"model": MODEL}, scheduler=drafts))
    await folders.fetch(state)
    assert state.folder == MODEL


async def test_wrong_settings_of_drafts_are_refused_before_a_drafter_is_fetched():
    drafts = {"speculative_config": {"model": "org/drafter", "num_speculative_tokns": 1}}
    state = AppState(config_of(model={"model": MODEL}, scheduler=drafts))
    with pytest.raises(ConfigError, match="did you mean 'num_speculative_tokens'"):
        await folders.fetch(state)


async def test_after_a_stop_no_part_of_the_start_begins():
    lifespan, begun = Lifespan(AppState(config_of(model={"model": MODEL}))), []

    async def part() -> None:
        begun.append(1)

    lifespan.stop()
    assert not await lifespan.unless_stopped(part(), None)
    assert lifespan.cut_short
    assert not begun
