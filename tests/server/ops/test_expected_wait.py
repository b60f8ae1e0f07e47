"""Expected waits, refusals and their Retry-After: Places with a clock that the test sets (SECURITY S42)."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest

from engine.base.errors import ConfigError
from server.errors import ApiError
from server.flags.config import Config, LimitsConfig
from server.ops import places as module
from server.ops.limits import ApiKeys, digest_name
from server.ops.places import Places
from server.state import AppState

ROWS, TOOK = 8, 2.0  # so 4 choices end each second


class Service:
    """Runs ROWS choices at a time for TOOK seconds each, and takes waiting callers in turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, max_wait: float = 10.0, **settings: object) -> None:
        self.now = 1000.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        self.places = Places(1000, max_wait=max_wait, **settings)  # type: ignore[arg-type]
        self.places.size(1000, ROWS, 2)
        self.lines: dict[str, deque[tuple[object, float]]] = {}
        self.running: list[tuple[float, object]] = []
        self.waits: list[tuple[str, float]] = []
        self.refused: list[tuple[str, int]] = []

    def ask(self, caller: str, weight: int = 1) -> None:
        try:
            place = self.places.hold(1, caller, weight=weight)
        except ApiError as error:
            self.refused.append((caller, int(error.headers["retry-after"])))
            return
        place.__enter__()
        self.lines.setdefault(caller, deque()).append((place, self.now))
        self.serve()

    def serve(self) -> None:
        while len(self.running) < ROWS and any(self.lines.values()):
            caller = next(caller for caller, line in self.lines.items() if line)
            place, since = self.lines[caller].popleft()
            self.lines[caller] = self.lines.pop(caller)  # the next callers come first now
            place.begin()  # type: ignore[attr-defined]
            self.waits.append((caller, self.now - since))
            self.running.append((self.now + TOOK, place))

    def pass_time(self, seconds: float) -> None:
        until = self.now + seconds
        while self.running and min(end for end, _ in self.running) <= until:
            self.running.sort(key=lambda entry: entry[0])
            self.now, place = self.running.pop(0)
            place.__exit__(None, None, None)  # type: ignore[attr-defined]
            self.serve()
        self.now = until


def test_s42_overload_waits_as_long_as_it_may_and_no_longer(monkeypatch):
    service = Service(monkeypatch, max_wait=5.0)
    for _ in range(720):  # 12 requests in a second, three times what the service ends
        service.ask("one")
        service.pass_time(1 / 12)
    waits = [wait for _, wait in service.waits]
    assert 3.5 < max(waits[len(waits) // 3 :]) < 6.0
    assert max(waits) < 9.0  # also before the first measured times
    assert len(service.waits) > 0.95 * 60 * 4
    assert len(service.refused) > 400


def test_s42_retry_after_grows_with_those_who_were_sent_away(monkeypatch):
    service = Service(monkeypatch, max_wait=5.0)
    for _ in range(300):
        service.ask("one")
        service.pass_time(0.02)
    told = [seconds for _, seconds in service.refused]
    assert told[0] <= 2
    assert told[-1] > 20
    assert told[-1] > told[len(told) // 2] > told[0]
    service.pass_time(120.0)
    service.ask("one")
    assert service.refused[-1][1] == told[-1]  # the newest request is not in the list, because it was not refused


def test_s42_a_quiet_caller_is_never_sent_away_by_anothers_crowd(monkeypatch):
    service = Service(monkeypatch, max_wait=5.0)
    for at in range(1200):
        service.ask("crowd")
        if at % 40 == 39:
            service.ask("quiet")
        service.pass_time(1 / 40)
    assert {caller for caller, _ in service.refused} == {"crowd"}
    quiet = [wait for caller, wait in service.waits if caller == "quiet"]
    assert len(quiet) >= 29  # the last one may still wait
    assert max(quiet) <= TOOK


def test_s42_a_heavier_key_may_wait_in_a_longer_line(monkeypatch):
    service = Service(monkeypatch, max_wait=5.0)
    for _ in range(600):
        service.ask("light")
        service.ask("heavy", weight=3)
        service.pass_time(1 / 20)
    line = service.places.lines["answers"].waiting
    assert line["heavy"] > 2 * line["light"]


def test_s42_the_first_one_after_a_long_silence_does_not_wait(monkeypatch):
    service = Service(monkeypatch, max_wait=1.0)
    for _ in range(ROWS):
        service.ask("one")
    service.pass_time(1.0)
    assert not service.refused
    for _ in range(3 * ROWS):
        service.ask("one")
    assert service.refused  # eight run, and fewer than eight end in a second
    service.pass_time(60.0)
    service.refused.clear()
    for _ in range(ROWS):
        service.ask("one")
    assert not service.refused


def test_s42_one_caller_leaves_places_for_others(monkeypatch):
    service = Service(monkeypatch, max_wait=0.0)
    for _ in range(1000):
        service.ask("crowd")
    assert 850 < service.places.taken < 900
    assert service.refused
    service.refused.clear()
    service.ask("other")
    assert not service.refused
    trusted = Service(monkeypatch, max_wait=0.0, shared=False)
    for _ in range(1000):
        trusted.ask("crowd")
    assert trusted.places.taken == 1000
    assert not trusted.refused


def test_s42_what_was_held_is_given_back_whoever_leaves(monkeypatch):
    places = Service(monkeypatch).places
    with places.hold(3, "one") as place:
        place.begin()
        assert (places.taken, places.requests, places.lines["answers"].running) == (3, 1, 1)
        with places.hold_more(2, "one", "speech"), places.hold(1, "two", "texts"):
            assert places.lines["speech"].running == 2
    place.begin()  # a late step of a request that has left
    assert (places.taken, places.requests, places.tokens) == (0, 0, 0)
    for line in places.lines.values():
        assert (line.running, line.total_waiting, line.waiting, line.weights) == (0, 0, {}, {})


BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
    "/v1/completions": {"prompt": "hi", "max_tokens": 1},
    "/v1/responses": {"input": "hi", "max_output_tokens": 1},
}


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("path", BODIES)
async def test_s42_a_request_that_would_wait_too_long_is_sent_away_and_another_keys_is_not(serve, path):
    body = BODIES[path]
    client = serve(server={"api_key": ("one", "two")}, limits={"max_queue_wait": 1.0})
    with client.state.places.hold(60, digest_name("one")):
        refused = await client.post(path, body, headers={"x-api-key": "one"})
        assert (refused.status, refused.error["reason"]) == (429, "queue_full")
        assert "--max-queue-wait" in refused.error["message"]
        assert 1 <= int(refused.reply_headers["retry-after"]) <= 60
        assert (await client.post(path, body, headers={"x-api-key": "two"})).status == 200
    assert (await client.post(path, body, headers={"x-api-key": "one"})).status == 200


@pytest.mark.asyncio(loop_scope="session")
async def test_s42_texts_have_a_line_of_their_own(serve):
    client = serve(limits={"max_queue_wait": 0.05})
    with client.state.places.hold(60, "10.0.0.1", "texts"):
        refused = await client.post("/tokenize", {"prompt": "hi"})
        assert (refused.status, refused.error["reason"]) == (429, "queue_full")
        assert (await client.post("/v1/completions", BODIES["/v1/completions"])).status == 200
    assert (await client.post("/tokenize", {"prompt": "hi"})).status == 200


@pytest.mark.asyncio(loop_scope="session")
async def test_s42_without_keys_addresses_wait_in_lines_of_their_own(serve):
    path, body = "/v1/completions", BODIES["/v1/completions"]
    proxied = {"trusted_proxies": ("10.0.0.0/24",)}
    client = serve(server=proxied, limits={"max_queue_wait": 1.0})
    with client.state.places.hold(60, "192.0.2.1"):
        refused = await client.post(path, body, headers={"x-forwarded-for": "192.0.2.1"})
        assert refused.status == 429
        assert (await client.post(path, body, headers={"x-forwarded-for": "192.0.2.2"})).status == 200
    trusting = serve(server=proxied, limits={"trust_clients": True})
    with trusting.state.places.hold(79, ""):
        assert (await trusting.post(path, body, headers={"x-forwarded-for": "192.0.2.1"})).status == 200


def test_trusted_clients_wait_as_long_as_they_like_unless_a_number_is_given():
    from tests.server.test_cli import config_of

    assert config_of().max_queue_wait == 10.0
    assert config_of("--trust-clients").max_queue_wait == 0.0
    assert config_of("--trust-clients", "--max-queue-wait", "30").max_queue_wait == 30.0
    assert config_of("--max-queue-wait", "0").max_queue_wait == 0.0


def test_s42_a_weight_stands_behind_the_key_in_its_file(tmp_path):
    path = tmp_path / "keys"
    path.write_text("alice:sk-1 weight=3\nsk-2 weight=20\nbob:sk 3 weights=4\n")
    keys = ApiKeys((), str(path))
    assert keys.match(b"sk-1") == "alice"
    assert keys.weight("alice") == 3
    assert keys.weight(keys.match(b"sk-2")) == 20
    assert keys.match(b"sk 3 weights=4") == "bob"  # the word is not `weight`, so it is part of the key
    assert keys.weight("bob") == keys.weight("nobody") == 1
    for word in ("0", "-1", "2.5", "many", "1001"):
        path.write_text(f"alice:sk-1 weight={word}\n")
        with pytest.raises(ConfigError, match=r"line 1: weight=.*; a weight is a whole number from 1 to 1000"):
            keys.reload()
    assert keys.weight("alice") == 3


def test_trusted_clients_share_nothing_out():
    usual, trusting = AppState(Config()), AppState(replace(Config(), limits=LimitsConfig(trust_clients=True)))
    for state, expected in ((usual, False), (trusting, True)):
        for shares in (state.body_budget, state.sessions.shares):
            assert shares.take("one", shares.limit - 1)
            assert shares.take("one", 1) is expected
        state.pool.shutdown()
