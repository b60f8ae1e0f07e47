"""The hash of a prompt's block includes all 16 bytes of the names of its media."""

from types import SimpleNamespace

import numpy as np
import pytest

import engine.run.admission
import engine.step.parts.media
from _fast.plan import StepPlan
from _fast.scheduler import Scheduler
from engine import MediaInput, Request, SamplingParams
from engine.base.config import EngineConfig
from engine.run.admission import Admission
from engine.step.parts.media import Media

SPAN = (2, 9)


class Named:
    """Replaces hashlib: every hash is the last 16 bytes of the data."""

    def __init__(self, data: bytes, **_options: object) -> None:
        self._data = data

    def digest(self) -> bytes:
        return self._data[-16:].rjust(16, b"\0")


@pytest.fixture
def cached(monkeypatch):
    """A function that serves a prompt with this medium's name, and returns the number of prompt tokens found cached."""
    scheduler = Scheduler(
        max_slots=1, max_rows=1, max_tokens=32, max_model_len=64, num_blocks=60, block_size=4, encoder_capacity=64
    )
    entries: dict[bytes, int] = {}
    encoder = SimpleNamespace(
        find=entries.get,
        stage=lambda entry, name, _: entries.setdefault(name, entry),
        evict=lambda *_: None,
        work_of=lambda item, _: item.num_tokens,
    )
    config = SimpleNamespace(adds_media=False, bidirectional="", text=SimpleNamespace(layers=()))
    model = SimpleNamespace(config=config, adapters=())
    part = Media(EngineConfig(""), model)
    part.encoder = encoder
    backend = SimpleNamespace(rank=SimpleNamespace(model=model))
    nothing = {name: lambda *_: None for name in ("admit", "reset", "displace")}
    executor = SimpleNamespace(backend=backend, place=part.place, free=part.free, may_enter=lambda _: True, **nothing)
    admission = Admission(scheduler, executor, shares_prefixes=True, poison=False)
    for module in (engine.run.admission, engine.step.parts.media):
        monkeypatch.setattr(module, "hashlib", SimpleNamespace(blake2b=Named))
    prompt, plan, numbers = np.arange(13, dtype=np.int32), StepPlan(1, 32, 256), iter(range(9))

    def serve(name: bytes) -> int:
        number = next(numbers)
        item = MediaInput("image", name, (SPAN,), SPAN[1], {})
        admission.submit(Request(prompt, SamplingParams(max_tokens=1), media=(item,)), number)
        assert not admission.refused
        assert scheduler.schedule(plan)
        found = scheduler.cached_tokens(0)
        scheduler.commit(plan, np.zeros(1, np.int32))
        admission.free_slots()
        return int(found)

    return serve


@pytest.mark.parametrize("place", range(16))
def test_media_whose_names_differ_in_one_byte_share_no_block(cached, place):
    one = bytes(range(100, 116))
    other = one[:place] + b"\0" + one[place + 1 :]
    assert cached(one) == 0
    assert cached(one) == 12
    assert cached(other) == 0
    assert (cached(one), cached(other)) == (12, 12)
