"""A crowd enters a few at a time, in its order, and whoever leaves the queue holds nobody up."""

from __future__ import annotations

import asyncio

from server.http.turnstile import PER_TURN, Turnstile


async def crowd(turnstile: Turnstile, size: int) -> tuple[list[asyncio.Task[None]], list[tuple[int, int]]]:
    """Tasks that enter, and where each came through: (turn of the loop, number)."""
    turn = 0
    entered: list[tuple[int, int]] = []

    async def one(number: int) -> None:
        await turnstile.enter()
        entered.append((turn, number))

    tasks = [asyncio.ensure_future(one(number)) for number in range(size)]

    async def clock() -> None:
        nonlocal turn
        for turn in range(4 * size):  # noqa: B007 - read by `one`
            await asyncio.sleep(0)

    return [*tasks, asyncio.ensure_future(clock())], entered


async def test_a_crowd_enters_in_order_and_a_few_per_turn():
    tasks, entered = await crowd(Turnstile(), 101)
    await asyncio.gather(*tasks)
    assert [number for _, number in entered] == list(range(101))
    turns = [turn for turn, _ in entered]
    assert max(turns.count(turn) for turn in turns) <= PER_TURN
    assert turns[-1] <= 2 * 101 / PER_TURN


async def test_a_lone_request_does_not_wait():
    turnstile = Turnstile()
    for _ in range(3):
        entering = turnstile.enter()
        try:
            entering.send(None)
        except StopIteration:
            pass
        else:
            raise AssertionError("it waited")
        await asyncio.sleep(0.01)
    assert not turnstile._turning, "nothing turns where nobody comes"


async def test_those_who_leave_do_not_take_a_place():
    turnstile = Turnstile()
    tasks, entered = await crowd(turnstile, 40)
    await asyncio.sleep(0)
    for task in tasks[PER_TURN:30]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert [number for _, number in entered] == [*range(PER_TURN), *range(30, 40)]
