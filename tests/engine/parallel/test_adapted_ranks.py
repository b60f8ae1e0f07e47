"""Adapters of a checkpoint on ranks: texts and sounds in the same steps have transformers' tokens."""

import pytest

import engine.run.start
from tests.engine.host_accelerator import HostAccelerator
from tests.engine.parallel.test_split_models import in_full
from tests.models.test_adapters import check
from tests.models.test_sounds import FAMILY


@pytest.mark.parametrize("on_device", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", [in_full("phi4mm"), "granite-speech-3.3"])
async def test_texts_and_sounds_have_the_tokens_of_transformers(monkeypatch, name, on_device):
    if on_device:
        monkeypatch.setattr(engine.run.start, "open_accelerator", lambda _device: HostAccelerator())
    await check(FAMILY[name], tensor_parallel=2)
