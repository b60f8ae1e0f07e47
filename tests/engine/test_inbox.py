"""The inbox's descriptor is readable exactly from a put until the next hush."""

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
        for item in range(3):  # one signal for all items
            inbox.put((round_, item))
            assert readable(inbox)
        inbox.hush()
        assert not readable(inbox)
        assert [inbox.take(0.0) for _ in range(len(inbox))] == [(round_, item) for item in range(3)]


def test_a_put_after_a_hush_makes_it_readable(inbox):
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


def test_an_item_put_before_the_watch_makes_it_readable():
    inbox = Inbox()
    inbox.put("early")
    inbox.watch()
    assert readable(inbox)
    inbox.close()
