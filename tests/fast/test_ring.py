"""OutputRing: each entry comes out once and in order, for any ring size; each entry wakes the loop."""

import os
import selectors
import threading

import numpy as np
import pytest

from _fast.ring import OutputRing


@pytest.fixture
def ring():
    made = OutputRing(4, 3)
    yield made
    made.close()


def readable(ring, timeout=0.0):
    with selectors.DefaultSelector() as selector:
        selector.register(ring.fd, selectors.EVENT_READ)
        return bool(selector.select(timeout))


def test_objects_come_out_in_order_and_only_once(ring):
    assert ring.pop() is None
    ring.put("a")
    ring.put("b")
    assert [ring.pop(), ring.pop(), ring.pop()] == ["a", "b", None]


def test_a_full_ring_sets_objects_aside_in_order(ring):
    for k in range(10):
        ring.put(k)
    assert len(ring) == 10
    assert [ring.pop() for _ in range(4)] == [0, 1, 2, 3]
    ring.put(10)
    assert [ring.pop() for _ in range(8)] == [*range(4, 11), None]
    ring.put(11)
    assert ring.pop() == 11


def test_an_entry_makes_the_descriptor_readable_until_it_is_acknowledged(ring):
    assert not readable(ring)
    ring.put(1)
    ring.put(2)
    assert readable(ring)
    ring.acknowledge()
    assert not readable(ring)
    ring.acknowledge()
    assert [ring.pop(), ring.pop()] == [1, 2]


def test_an_object_is_let_go_when_it_is_popped(ring):
    import weakref

    value = np.zeros(3)
    gone = weakref.ref(value)
    ring.put(value)
    assert ring.pop() is value
    del value
    assert gone() is None


@pytest.mark.parametrize("entries", [1, 3, 64])
def test_a_thread_that_pops_sees_everything_in_order(entries):
    ring, seen = OutputRing(4, entries), []

    def consume():
        with selectors.DefaultSelector() as selector:
            selector.register(ring.fd, selectors.EVENT_READ)
            while not seen or seen[-1] != 4999:
                assert selector.select(5.0), "not woken"
                ring.acknowledge()
                while (value := ring.pop()) is not None:
                    seen.append(value)

    thread = threading.Thread(target=consume)
    thread.start()
    for k in range(5000):
        ring.put(k)
    thread.join(20)
    assert seen == list(range(5000))
    ring.close()


def test_a_closed_ring_gives_its_descriptor_back():
    ring = OutputRing(1)
    fd = ring.fd
    os.fstat(fd)
    ring.close()
    ring.close()
    with pytest.raises(OSError):
        os.fstat(fd)
    with pytest.raises(ValueError, match="at least 1 of each"):
        OutputRing(4, 0)
