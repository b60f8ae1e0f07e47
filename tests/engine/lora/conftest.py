"""Backends of tests of adapters."""

import pytest

from engine.run import start
from tests.engine.host_accelerator import HostAccelerator


@pytest.fixture(params=["host", "device"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both backends; the device has graphs that are plain calls."""
    if request.param == "device":
        monkeypatch.setattr(start, "open_accelerator", lambda _device: HostAccelerator())
    return str(request.param)
