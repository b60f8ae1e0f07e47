"""Timelines and spans: a trace's events of steps, threads and requests, and the spans that a collector receives."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from engine.base.errors import ConfigError
from engine.base.output import StepOutput
from engine.base.stats import StepStats
from engine.base.trace import DEVICE_THREAD, IN_FLIGHT, LOOP, POOL, STREAMS, Trace
from engine.device.profile import span_of
from server.ops import tracing
from server.ops.otel import Spans
from tests.end_to_end.process import SMALL, ServerProcess
from tests.server.asgi import Client

LOCAL = {"host": "localhost"}
LONG = "word " * 600  # long enough to be tokenized in the pool


def checked(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a document, checked against Chrome's trace format: complete spans nest, async ones are closed."""
    events = document["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    for event in events:
        assert event["ph"] in "MXCbe", event
        assert event["name"]
        assert isinstance(event["pid"], int)
        assert event["ph"] == "M" or event["ts"] >= 0, event
    for track in {event["tid"] for event in events if event["ph"] == "X"}:
        assert track in names
        open_until: list[float] = []
        spans = [(event["ts"], -event["dur"]) for event in events if event["ph"] == "X" and event["tid"] == track]
        for begun, length in sorted(spans):
            while open_until and open_until[-1] <= begun + 0.002:
                open_until.pop()
            assert not open_until or begun - length <= open_until[-1] + 0.002, (names[track], begun, length, open_until)
            open_until.append(begun - length)
    for ident in {event["id"] for event in events if event["ph"] in "be"}:
        marks = [event["ph"] for event in events if event.get("id") == ident]
        assert marks.count("b") == marks.count("e")
    return events


def of(events: list[dict[str, Any]], *tracks: int) -> list[dict[str, Any]]:
    return sorted((e for e in events if e["ph"] == "X" and e["tid"] in tracks), key=lambda e: e["ts"])


@pytest.fixture
def operator(serve) -> Client:
    client = serve(server={"enable_dev_endpoints": True, "host": "127.0.0.1"})
    client.headers = LOCAL
    return client


@pytest.mark.asyncio(loop_scope="session")
async def test_a_trace_shows_two_steps_in_flight_and_who_was_in_them(operator):
    assert (await operator.post("/start_profile")).status == 200
    refused = await operator.post("/start_profile")
    assert (refused.status, refused.error["reason"]) == (409, "profiling")
    asked = {"max_tokens": 60, "ignore_eos": True, "temperature": 0}
    messages = [{"role": "user", "content": LONG[:300]}]
    await asyncio.gather(
        *(
            operator.post("/v1/chat/completions", {"messages": messages, **asked}, headers={"x-request-id": f"r{k}"})
            for k in range(3)
        ),
        operator.post("/tokenize", {"prompt": LONG}),
    )
    reply = await operator.post("/stop_profile")
    events = checked(reply.json())
    flights = [event for event in of(events, *IN_FLIGHT) if event["name"].startswith("step ")]
    assert len(flights) >= 60
    overlaps = [a for a, b in pairwise(flights) if b["ts"] < a["ts"] + a["dur"]]
    assert overlaps, "a step is launched before the tokens of the one before it are there"
    assert all(a["tid"] != b["tid"] for a, b in pairwise(flights))
    assert {"r0", "r1", "r2"} <= {name for event in flights for name in event["args"]["requests"]}
    assert {"plan the next step", "launch it", "wait", "commit"} <= {e["name"] for e in of(events, DEVICE_THREAD)}
    assert "deliver" in {event["name"] for event in of(events, LOOP)}
    assert of(events, *range(POOL, STREAMS)), "the pool tokenized"
    told = [event for event in events if event["ph"] == "b" and event["id"] == "r1"]
    assert [event["name"] for event in told] == ["request", "prepare", "wait for the first step", "prefill", "decode"]
    assert told[0]["args"]["generated"] == 60
    ended = await operator.post("/stop_profile")
    assert (ended.status, ended.error["reason"]) == (409, "not_profiling")
    assert operator.state.engine.trace is operator.state.pool.trace is operator.state.trace is None


@pytest.mark.asyncio(loop_scope="session")
async def test_without_a_trace_nothing_is_noted_or_wrapped(operator, monkeypatch):
    for name in ("add", "step", "label", "request", "pooled"):
        monkeypatch.setattr(Trace, name, lambda *args, **more: pytest.fail("a trace that nobody takes"))
    monkeypatch.setattr("server.ops.pool.timed", lambda *args: pytest.fail("a trace that nobody takes"))
    monkeypatch.setattr("server.http.exchange.RequestTimes", lambda *args: pytest.fail("nobody follows requests"))
    reply = await operator.post("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG[:300]}]})
    assert reply.status == 200
    assert (await operator.post("/tokenize", {"prompt": LONG})).status == 200


@pytest.mark.asyncio(loop_scope="session")
async def test_kernels_need_an_accelerator_and_have_a_track_for_each_stream(operator, monkeypatch):
    refused = await operator.post("/start_profile?kernels=true")
    assert (refused.status, refused.error["param"]) == (400, "kernels")
    assert (await operator.post("/start_profile?kernels=maybe")).error["param"] == "kernels"

    async def yes() -> bool:
        return True

    async def spans() -> list[Any]:
        begun = int(operator.state.trace.begun * 1e9)
        found = {"start_ns": begun + 5000, "end_ns": begun + 9000, "name": "rms_norm", "device_resource_id": 7}
        events = [{**found, "device_index": device} for device in (0, 1)]
        return [
            span_of(SimpleNamespace(**{key: lambda value=value: value for key, value in each.items()}), 0.0)
            for each in events
        ]

    monkeypatch.setattr(operator.state.engine, "start_profile", yes)
    monkeypatch.setattr(operator.state.engine, "stop_profile", spans)
    assert (await operator.post("/start_profile?kernels=true")).status == 200
    events = checked((await operator.post("/stop_profile")).json())
    (kernel,) = of(events, STREAMS + 7)
    assert (kernel["name"], kernel["dur"]) == ("rms_norm", pytest.approx(4, abs=0.5))
    named = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"stream 7: kernels and copies", "rank 1, stream 7: kernels and copies"} <= named


def test_parts_of_the_device_thread_do_not_overlap_and_a_full_trace_counts_what_it_leaves_out(monkeypatch):
    trace = Trace()
    for number in range(4):  # durations longer than the time between the ends of two steps
        at = trace.begun + 0.01 * (number + 1)
        stats = StepStats(
            step_id=number, num_rows=1, num_tokens=1, schedule_s=0.004, launch_s=0.005, wait_s=0.003, commit_s=0.002,
            device_s=0.009, launched_at=at - 0.012, ended_at=at, waited_at=at,
        )  # fmt: skip
        trace.step(StepOutput(stats, [number], [5], [0]))
    checked(trace.document())
    monkeypatch.setattr("engine.base.trace.MAX_EVENTS", 4)
    trace.add(LOOP, "deliver", 0.0, 1.0)
    assert trace.document()["otherData"] == {"left_out": 1}


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """Runs an OTLP collector; yields its URL and the list of received spans."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    found: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                found.extend(span for scope in resource.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", found
    finally:
        server.shutdown()
        server.server_close()


def attributes(span: Any) -> dict[str, Any]:
    return {entry.key: getattr(entry.value, entry.value.WhichOneof("value")) for entry in span.attributes}


def test_a_process_writes_its_trace_and_sends_spans_by_the_conventions(tmp_path):
    trace, parent = tmp_path / "trace.json", "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"
    body = {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 4, "ignore_eos": True, "seed": 3}
    with collector() as (url, spans):
        process = ServerProcess(*SMALL, "--trace", str(trace), "--otlp-traces-endpoint", url).spawn()
        try:
            process.wait_ready()
            with httpx.Client(base_url=f"http://127.0.0.1:{process.port}") as client:
                headers = {"traceparent": parent, "x-request-id": "mine"}
                assert client.post("/v1/chat/completions", json=body, headers=headers).status_code == 200
                assert client.post("/v1/chat/completions", json={"messages": []}).status_code == 400
            process.stop()
        finally:
            process.close()
    events = checked(json.loads(trace.read_text()))
    assert "mine" in {name for event in of(events, *IN_FLIGHT) for name in event["args"].get("requests", ())}
    answered, refused = sorted(spans, key=lambda span: span.start_time_unix_nano)
    found = attributes(answered)
    assert answered.name == "chat omniloop"
    assert (answered.trace_id.hex(), answered.parent_span_id.hex()) == ("ab" * 16, "cd" * 8)
    assert found["gen_ai.operation.name"] == "chat"
    assert (found["gen_ai.usage.output_tokens"], found["gen_ai.request.max_tokens"]) == (4, 4)
    assert found["gen_ai.usage.input_tokens"] > 3
    assert [value.string_value for value in found["gen_ai.response.finish_reasons"].values] == ["length"]
    assert 0 < found["gen_ai.latency.time_to_first_token"] < found["gen_ai.latency.e2e"]
    assert [event.name for event in answered.events] == ["wait for the first step", "prefill", "decode"]
    assert attributes(refused)["http.response.status_code"] == 400
    assert attributes(refused)["error.type"]
    conventions = __import__("opentelemetry.semconv._incubating.attributes.gen_ai_attributes", fromlist=["x"])
    known = {value for name, value in vars(conventions).items() if name.startswith("GEN_AI")}
    assert {name for name in found if name.startswith("gen_ai.") and "latency" not in name} <= known


def test_an_endpoint_that_is_no_url_is_refused():
    with pytest.raises(ConfigError, match="must be a URL such as http://localhost:4318/v1/traces"):
        Spans("localhost:4317")


@pytest.mark.parametrize("place", ["none/trace.json", "."])
def test_a_trace_that_could_not_be_written_at_the_end_ends_the_start(tmp_path, place):
    with pytest.raises(ConfigError, match=r"--trace .*: cannot be written; name a file in a folder"):
        tracing.check_place(str(tmp_path / place))
    tracing.check_place(str(tmp_path / "trace.json"))
