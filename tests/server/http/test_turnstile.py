"""Many requests enter in order, a few per turn of the loop; a single request enters at once."""

from __future__ import annotations

import asyncio
from functools import partial

from server.http.turnstile import PER_TURN, Turnstile


async def crowd(turnstile: Turnstile, size: int, turns: int) -> list[tuple[int, int]]:
    """(turn of the loop, number) of each of `size` requests, in the order of entering."""
    turn = 0
    entered: list[tuple[int, int]] = []

    def through(number: int) -> None:
        entered.append((turn, number))

    for number in range(size):
        if turnstile.enter(partial(through, number)):
            through(number)
    for turn in range(1, turns):  # noqa: B007 - read by `through`
        await asyncio.sleep(0)
    return entered


async def test_a_crowd_enters_in_order_and_a_few_per_turn():
    turnstile = Turnstile()
    entered = await crowd(turnstile, 101, 150)
    assert [number for _, number in entered] == list(range(101))
    turns = [turn for turn, _ in entered]
    assert max(turns.count(turn) for turn in turns) <= PER_TURN
    assert turns[-1] <= 2 * 101 / PER_TURN


async def test_a_lone_request_does_not_wait():
    turnstile = Turnstile()
    for _ in range(3):
        assert await crowd(turnstile, 1, 3) == [(0, 0)]
        await asyncio.sleep(0.01)
    assert not turnstile._turning, "nothing turns where nobody comes"


async def test_newcomers_stand_behind_those_who_wait():
    turnstile = Turnstile()
    first = asyncio.ensure_future(crowd(turnstile, 3 * PER_TURN, 20))
    await asyncio.sleep(0)
    late: list[int] = []
    assert not turnstile.enter(partial(late.append, 1)), "two turns' worth of others wait"
    assert len(await first) == 3 * PER_TURN
    assert late == [1]
