"""Connections leave descriptors for files; the process's limit is raised where the system allows."""

from __future__ import annotations

import logging
import resource

import pytest

from server.ops import descriptors
from server.ops.descriptors import RESERVED, room_for

UNBOUNDED = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "room", "raised"),
    [
        (1024, 1 << 20, 4096, 4096, 4096 + RESERVED),
        (1024, UNBOUNDED, 4096, 4096, 4096 + RESERVED),
        (1024, 1024, 4096, 1024 - RESERVED, 1024),
        (64, 64, 4096, 24, 64),
        (65536, 65536, 4096, 4096, None),
        (UNBOUNDED, UNBOUNDED, 4096, 4096, None),
    ],
)
def test_s11_connections_leave_descriptors_for_files(monkeypatch, caplog, soft, hard, wanted, room, raised):
    set_to = []
    monkeypatch.setattr(descriptors.resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(descriptors.resource, "setrlimit", lambda _, limits: set_to.append(limits))
    with caplog.at_level(logging.WARNING, "omniloop"):
        assert room_for(wanted) == room
    assert set_to == ([(raised, hard)] if raised is not None else [])
    assert ("raise ulimit -n to" in caplog.text) == (room < wanted)
