"""The inbox's descriptor: readable exactly while something was put that no taker has been told of."""

from __future__ import annotations

import select
from collections.abc import Iterator

import pytest

from engine.base.inbox import Inbox


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    inbox = Inbox()
    inbox.watch()
    yield inbox
    inbox.close()


def readable(inbox: Inbox) -> bool:
    return bool(select.select([inbox.fd], [], [], 0)[0])


def test_it_is_readable_from_a_put_to_the_next_hush(inbox):
    assert not readable(inbox)
    for round_ in range(3):
        for item in range(3):  # told once, not for each
            inbox.put((round_, item))
            assert readable(inbox)
        inbox.hush()
        assert not readable(inbox)
        assert [inbox.take(0.0) for _ in range(len(inbox))] == [(round_, item) for item in range(3)]


def test_what_is_put_behind_a_hush_is_told(inbox):
    inbox.put("first")
    inbox.hush()
    inbox.put("second")
    assert readable(inbox)


def test_a_taker_that_leaves_some_behind_reminds(inbox):
    inbox.put("first")
    inbox.put("second")
    inbox.hush()
    assert inbox.take(0.0) == "first"
    inbox.remind()
    assert readable(inbox)
    inbox.hush()
    assert inbox.take(0.0) == "second"
    inbox.remind()
    assert not readable(inbox)


def test_what_was_there_before_it_is_watched_is_told():
    inbox = Inbox()
    inbox.put("early")
    inbox.watch()
    assert readable(inbox)
    inbox.close()
