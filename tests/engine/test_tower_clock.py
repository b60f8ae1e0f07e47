"""The device's timers measure the towers' times without a wait for the device."""

import pytest
import torch

from engine.step.parts.encoder_cache import TowerClock


class Event:
    """Replaces a device's event: fires when `now` has passed the time of its record."""

    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = Event.now

    def query(self) -> bool:
        return Event.now > self.at

    def elapsed_time(self, other: "Event") -> float:
        return (other.at - self.at) * 1000


def test_runs_count_once_the_device_has_done_them(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = TowerClock(on_device=True)
    for begin, end in ((1.0, 3.0), (4.0, 4.5)):
        Event.now = begin
        with clock.of([int(begin), 9]):
            Event.now = end
    assert (clock.calls, clock.seconds) == (2, 2.0)  # the end of the second run has not been seen yet
    clock.collect()
    assert clock.seconds == 2.0
    Event.now = 5.0
    clock.collect()
    clock.collect()
    assert clock.seconds == 2.5
    assert clock.took == {1: 1.0, 4: 0.25, 9: 1.25}, "items that share a run share its time"


def test_a_host_takes_its_own_time_and_keeps_errors():
    clock = TowerClock(on_device=False)
    with pytest.raises(ValueError, match="planted"), clock:
        raise ValueError("planted")
    assert clock.calls == 1
    assert clock.seconds > 0
