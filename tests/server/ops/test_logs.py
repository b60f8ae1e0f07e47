"""Log lines: one for each request in both forms; clients' texts are logged only on the operator's request."""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time

import pytest

from server.flags.config import ServerConfig
from server.ops.limits import digest_name
from server.ops.log_lines import MOST_BYTES, LineWriter
from server.ops.logs import JsonLines, Rate, TextLines, configure, lines_dropped
from tests.server.live import without_end

on_session_loop = pytest.mark.asyncio(loop_scope="session")


def lines(caplog, name: str) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == name]


@on_session_loop
async def test_a_request_is_one_line_in_both_forms(serve, caplog):
    client = serve(server={"api_key": ("secret",)})
    without_end(client)
    with caplog.at_level(logging.INFO, "omniloop"):
        keyed = {"authorization": "Bearer secret", "x-request-id": "mine"}
        await client.post("/v1/chat/completions?q=hidden", {"messages": [{"role": "user", "content": "hi"}],
                          "max_tokens": 3}, headers=keyed)  # fmt: skip
        await client.get("/v1/models")  # 401
    done, refused = lines(caplog, "omniloop.access")
    text = TextLines().format(done)
    assert " info omniloop.access mine POST /v1/chat/completions 200 " in text
    assert f"key={digest_name('secret')}" in text
    assert "generated=3" in text
    told = json.loads(JsonLines().format(done))
    assert {name: told[name] for name in ("level", "logger", "request_id", "method", "route", "status", "key")} == {
        "level": "info", "logger": "omniloop.access", "request_id": "mine", "method": "POST",
        "route": "/v1/chat/completions", "status": 200, "key": digest_name("secret"),
    }  # fmt: skip
    assert told["generated"] == 3
    assert told["first_ms"] <= told["ms"]
    assert json.loads(JsonLines().format(refused))["reason"] == "invalid_api_key"
    assert "hidden" not in caplog.text
    assert "secret" not in caplog.text


@on_session_loop
async def test_words_are_logged_only_where_asked_for(serve, caplog):
    body = {"max_tokens": 4, "temperature": 0, "seed": 7}
    for server in ({}, {"enable_log_requests": True}, {"enable_log_requests": True, "enable_log_outputs": True}):
        client = serve(server={**server, "max_log_len": 40})
        without_end(client)
        caplog.clear()
        with caplog.at_level(logging.INFO, "omniloop"):
            said = (await client.complete("one two " * 30, **body)).json()["choices"][0]["text"]
            await client.complete("one two " * 30, **body, stream=True)
        found = [record.getMessage() for record in lines(caplog, "omniloop.words")]
        assert len(found) == 2 * len(server)
        for text in found:
            if " asks: " in text:
                assert f" asks: {('one two ' * 30)[:40]} | " in text
                assert "seed=7" in text
                assert "temperature=0.0" in text
            else:
                assert f" gets: {said[:40]} | 4 tokens, length" in text


@on_session_loop
async def test_token_id_prompts_are_logged_as_ids(serve, caplog):
    client = serve(server={"enable_log_requests": True})
    with caplog.at_level(logging.INFO, "omniloop"):
        await client.complete([5, 6, 7], max_tokens=1)
    assert "asks: 5 6 7 | 3 tokens" in caplog.text


def test_a_reader_that_has_stopped_costs_lines_and_no_time():
    reading, writing = os.pipe()
    writer = LineWriter(writing)
    try:
        line = "x" * 999 + "\n"
        begun = time.perf_counter()
        for _ in range(3 * MOST_BYTES // len(line)):
            writer.add(line)
        assert time.perf_counter() - begun < 5, "nothing reads, and nothing waits"
        dropped = writer.dropped
        assert dropped > MOST_BYTES // len(line)
        assert not writer.flush(0.01)
        data = b""
        while b"last" not in data:
            data += os.read(reading, 1 << 20)
            if len(data) > MOST_BYTES // 2 and not data.count(b"last") and writer.dropped == dropped:
                writer.add("last\n")
        assert writer.flush(10)
        assert sum(int(count) for count in re.findall(rb"(\d+) lines were left out", data)) == dropped
        assert len(data) < MOST_BYTES + 200_000
        assert lines_dropped() >= 0
    finally:
        os.close(reading)
        os.close(writing)


def test_a_full_disk_costs_lines(tmp_path):
    said = threading.Event()
    with open("/dev/full", "wb", buffering=0) as full:
        writer = LineWriter(full.fileno(), said.set)
        writer.add("lost\n")
        assert said.wait(60)
        assert writer.flush(10)
        assert writer.dropped == 1


def test_the_form_is_the_operators_choice_and_repeats_are_counted():
    root, ours = logging.getLogger(), logging.getLogger("omniloop")
    before = root.handlers, root.level, ours.level
    try:
        for form, kind in (("text", TextLines), ("json", JsonLines)):
            configure(ServerConfig(log_format=form, log_rate=2, log_level="warning"))
            (handler,) = root.handlers
            assert isinstance(handler.formatter, kind)
            assert ours.level == logging.WARNING
        (rate,) = handler.filters
        assert isinstance(rate, Rate)
        record = logging.makeLogRecord({"msg": "again", "levelno": logging.INFO})
        assert [bool(rate.filter(record)) for _ in range(4)] == [True, True, False, False]
    finally:
        logging.captureWarnings(False)
        root.handlers, level, ours_level = before
        root.setLevel(level)
        ours.setLevel(ours_level)
