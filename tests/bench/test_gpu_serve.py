"""gpu_serve on a tiny model: each load sends its requests as specified, and the printed numbers match the records."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import socket
import statistics
import time
from array import array
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import uvloop

from engine.base.output import StepOutput
from engine.base.stats import StepStats
from server.bench.dataset import conversations
from server.bench.reply import Reply
from tests.bench import gpu_serve, loads, targets
from tests.bench.asked import Came, load, parts_of, summary
from tests.bench.watched import Deliveries, homes


@pytest.mark.slow
def test_every_load_of_a_tiny_model(tmp_path, capsys):
    flags = ["--shape", "tiny", "--device", "cpu", "--load", "mixed,conversation,prefix,loop"]
    assert gpu_serve.main([*flags, "--seconds", "0.5", "--warm-up", "0.2", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "gpu_serve.json").read_text())["tiny"]
    cases = report["cases"]
    shared = "4 streams of 256 shared tokens and 16"
    assert list(cases) == [
        "16 requests of 8 to 32 tokens", "1 streams of conversations", "4 streams of conversations", shared,
        shared + loads.FRESH, "0 streams", "a prompt of 1008 tokens",
    ]  # fmt: skip
    assert report["failed"] == []
    assert cases["16 requests of 8 to 32 tokens"]["answers"] == 16
    assert cases[shared]["prompt tokens found"] > 0.9
    assert cases[shared + loads.FRESH]["prompt tokens found"] == 0
    assert report["ratios"][f"{shared}, output, found over not"] > 0
    for label, found in cases.items():
        assert found["loop stall p50"] <= found["loop stall p99"] <= found["loop stall max"]
        if label != "0 streams":
            assert 0 < found["written p50"] <= found["written p99"]
            assert found["written share"] == pytest.approx(1, abs=0.2)
            assert min(found["output"], found["TTFT p50"], found["TPOT"]) > 0
    shown = capsys.readouterr().out
    assert "4 streams of conversations, written p50" in shown
    assert all(case in shown for case in cases)


def test_rules_are_asked_for_by_one_or_by_all_of_the_same_streams(tmp_path):
    plain, *others = loads.cases_of("0.6b", ["rules"], "", None)
    assert plain.name == loads.PLAIN
    for case in others:
        assert (case.streams, case.lengths, case.seed) == (32, plain.lengths, plain.seed)
        parts = parts_of("url", "0.6b", case, 9.0, 0, tmp_path)
        assert sum(part.max_concurrency for part in parts) == 32
        ruled = parts[-1]
        assert (ruled.max_concurrency, ruled.extra_body) == (case.ruled, dict(case.fields))
        assert all(part.extra_body == {} and part.seed != ruled.seed for part in parts[:-1])
    cases = {plain.name: {"output": 200.0}, others[0].name: {"output": 199.0}}
    assert gpu_serve.ratios_of(cases) == {f"{others[0].name}, output, over none": 0.995}


@pytest.mark.full
def test_texts_are_asked_alongside_pictures(tmp_path):
    flags = ["--shape", "tiny-vl", "--device", "cpu", "--load", "pictures", "--seconds", "2", "--warm-up", "0.2"]
    assert gpu_serve.main([*flags, "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "gpu_serve.json").read_text())["tiny-vl"]
    assert list(report["cases"]) == [
        "32 streams of small pictures", "8 streams of texts", "8 streams of texts with 8 of pictures",
    ]  # fmt: skip
    assert all(found["failures"] == 0 and found["output"] > 0 for found in report["cases"].values())
    assert report["ratios"]["8 streams of texts with 8 of pictures, ITL p99, over none"] > 0


def test_pictures_alongside_texts_are_a_case_of_their_own(tmp_path):
    small, alone, together = loads.cases_of("vl-7b", ["pictures"], "", None)
    assert (small.picture, small.streams, alone.background) == ((336, 336), 32, None)
    assert (together.background.picture, together.background.streams) == ((1024, 1024), 8)
    texts, pictures = parts_of("url", "vl-7b", together, 9.0, 1000, tmp_path)
    assert (texts.max_concurrency, texts.processes, texts.images, texts.input_len) == (8, 1, 0, 512)
    assert (pictures.max_concurrency, pictures.processes, pictures.image_size) == (8, 2, "1024x1024")
    assert pictures.num_media == 0, "each request has a picture of its own"
    (again,) = parts_of("url", "vl-7b", loads.cases_of("vl-7b", ["streams"], "", None)[-1], 9.0, 0, tmp_path)
    assert again.num_media == 1
    cases = {alone.name: {"ITL p50": 8.0, "ITL p99": 10.0}, together.name: {"ITL p50": 10.0, "ITL p99": 40.0}}
    assert list(gpu_serve.ratios_of(cases).values()) == [1.25, 4.0]
    with pytest.raises(ValueError, match="sees no pictures"):
        loads.cases_of("8b", ["pictures"], "", None)


def test_forms_of_weights_are_served_in_turn_and_compared_with_floats(monkeypatch, capsys):
    served = []

    def run_shape(shape, args):
        served.append((shape, args.weights))
        if args.weights == "w4":
            raise RuntimeError("no room")
        return 0, {"16 streams": {"output": 100.0 if args.weights == "floats" else 138.0}}

    monkeypatch.setattr(gpu_serve, "run_shape", run_shape)
    assert gpu_serve.main(["--shape", "8b", "--weights", "floats,fp8,w4"]) == 1
    assert served == [("8b", "floats"), ("8b", "fp8"), ("8b", "w4")]
    assert capsys.readouterr().out == "8b, fp8, 16 streams: 1.38 times the output of floats\n"
    with pytest.raises(SystemExit):
        gpu_serve.main(["--weights", "fp8,w5"])
    assert "--weights w5: there are floats, fp8" in capsys.readouterr().err


def test_loads_are_the_same_each_time():
    first, again = (loads.cases_of("8b", ["mixed", "conversation", "prefix", "loop"], "", None) for _ in range(2))
    assert first == again
    assert [case.name for case in first] == [
        "256 requests of 100 to 1024 tokens", "1 streams of conversations", "4 streams of conversations",
        "32 streams of conversations", "256 streams of conversations", "16 streams of 2048 shared tokens and 128",
        "16 streams of 2048 shared tokens and 128 (none found)", "0 streams", "a prompt of 40944 tokens",
    ]  # fmt: skip
    assert all(case.cached for case in first)
    lengths = np.array(first[0].lengths)
    assert lengths.shape == (256, 2)
    assert 100 <= lengths.min() <= lengths.max() <= 1024
    with pytest.raises(ValueError, match="there are streams, mixed"):
        loads.cases_of("8b", ["everything"], "", None)


def test_the_peers_cases_have_the_cache_off():
    found = loads.cases_of("8b", ["streams"], "4x230,256", None)
    assert [(case.name, case.lengths) for case in found] == [
        ("4 streams of 230 tokens", ((230, 128),)),
        ("256 streams", ((512, 128),)),
    ]
    assert not any(case.cached for case in found)
    pictures = loads.cases_of("vl-7b", ["streams"], "", None)
    assert [case.cached for case in pictures] == [False] * 7 + [True]
    seen = {f"{case.name}, {name}" for case in pictures for name in gpu_serve.UNITS}
    assert set(targets.SERVE["vl-7b"]) <= seen | {"ready"}
    assert [case.coding for case in pictures] == ["jpeg"] * 3 + ["jpeg"] + ["noise"] * 3 + ["jpeg"]


class Canned:
    """A server with fixed answers: a whole one, a refused one, and one whose usage differs from its streamed tokens."""

    chunk = b'data: {"choices":[{"index":0,"text":"a"}]}\n\n'
    usage = b'data: {"choices":[],"usage":{"completion_tokens":%d}}\n\ndata: [DONE]\n\n'

    def __init__(self) -> None:
        self.asked = 0
        self.serving: list[asyncio.Task] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one client until the client leaves, possibly in the middle of an answer."""
        self.serving.append(asyncio.current_task())
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await self.answer(reader, writer)
        with contextlib.suppress(ConnectionError):
            writer.close()
            await writer.wait_closed()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readline():
            length = 0
            while (line := await reader.readline()) != b"\r\n":
                if line.lower().startswith(b"content-length"):
                    length = int(line.split(b":")[1])
            body = json.loads(await reader.readexactly(length))
            assert head.startswith(b"POST /v1/completions")
            assert body["stream_options"] == {"include_usage": True}
            self.asked += 1
            if self.asked == 2:
                writer.write(b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 4\r\n\r\nbusy")
                continue
            head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
            writer.write(head)
            for part in (self.chunk, self.chunk, self.usage % (3 if self.asked == 3 else 2)):
                writer.write(b"%x\r\n%s\r\n" % (len(part), part))
                await asyncio.sleep(0.002)
            writer.write(b"0\r\n\r\n")


async def test_clients_count_the_tokens_of_usage_and_the_requests_that_fail(tmp_path):
    canned = Canned()
    server = await asyncio.start_server(canned.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    (case,) = loads.cases_of("8b", ["streams"], "1x8", None)
    parts = parts_of(f"http://127.0.0.1:{port}", "8b", case, 100.0, 5, tmp_path)
    came = await asyncio.to_thread(load, parts, "m", 0, 0.0, 100.0, None, 5)
    server.close()
    await asyncio.gather(*canned.serving)
    whole = [answer for answer in came.answers if not answer.cut]
    assert [answer.tokens for answer in whole] == [2, 3, 2, 2]
    assert [answer.events for answer in whole] == [2] * 4
    assert came.failures == ("HTTP 429: busy",)
    assert came.until - came.begun < 90, "five answers end the case"
    assert summary(came, came.begun, time.perf_counter())["failures"] == 1


def test_conversations_have_the_published_means():
    prompts, answers = zip(*loads.conversations())
    assert statistics.mean(prompts) == pytest.approx(217.4, rel=0.05)
    assert statistics.mean(answers) == pytest.approx(201.8, rel=0.05)
    assert all(map(loads.is_asked, prompts, answers))


def test_lengths_of_a_file_of_conversations(tmp_path):
    def talk(*texts: str) -> dict:
        return {"conversations": [{"from": who, "value": text} for who, text in zip(("human", "gpt") * 2, texts)]}

    opened = {"conversations": [{"from": "system", "value": "s"}, *talk("q" * 40, "a" * 80)["conversations"]]}
    talks = [talk("q" * 400, "a" * 41, "more", "still"), talk("q" * 4, "a" * 400), talk("q" * 5000, "a" * 40)]
    file = tmp_path / "sharegpt.json"
    file.write_text(json.dumps([*talks, talk("alone"), {"conversations": []}, opened]))
    assert sorted(loads.read_conversations(file)) == [(10, 20), (100, 11)]
    case = loads.cases_of("8b", ["conversation"], "", file)[0]
    assert sorted(case.lengths) == [(10, 20), (100, 11)]
    file.write_text("[]")
    with pytest.raises(ValueError, match="no conversation in it"):
        loads.read_conversations(file)


def test_lengths_that_differ_are_prompts_of_a_file(tmp_path):
    (case,) = loads.cases_of("8b", ["mixed"], "", None)
    (part,) = parts_of("url", "8b", case, 180.0, 0, tmp_path)
    assert (part.num_prompts, part.max_concurrency, part.processes) == (256, 256, 8)
    turns = [one.turns[0] for first in range(8) for one in conversations(part, first, 8)]
    assert sorted((len(turn.content), turn.max_tokens) for turn in turns) == sorted(case.lengths)
    (equal,) = loads.cases_of("8b", ["streams"], "33", None)
    (part,) = parts_of("url", "8b", equal, 9.0, 0, tmp_path)
    assert (part.max_concurrency, part.processes, part.input_len, part.output_len) == (33, 2, 512, 128)
    (part,) = parts_of("url", "vl-7b", equal, 9.0, 0, tmp_path)
    assert part.vocab_size == 151644  # special tokens have larger ids
    shared, fresh = loads.cases_of("8b", ["prefix"], "", None)
    sizes = [
        (part.prefix_len, part.input_len)
        for one in (shared, fresh)
        for part in parts_of("u", "8b", one, 1, 0, tmp_path)
    ]
    assert sizes == [(2048, 128), (0, 2176)]


def of(place: int, first: float, ats: list[float], tokens: int) -> Reply:
    """An answer that was sent a second before its first event; the other events came at the times `ats`."""
    gaps = np.diff([first, *ats]).tolist()
    return Reply(
        0,
        0,
        place=place,
        sent=first - 1,
        first=first,
        last=ats[-1],
        end=ats[-1],
        gaps=gaps,
        events=len(ats) + 1,
        completion_tokens=tokens,
    )


def test_rates_of_unequal_answers_count_what_arrived():
    unequal = [of(0, 1.0, [2.0, 3.0, 4.0], 4), of(0, 5.0, [6.0, 7.0], 3)]
    found = summary(Came(0.0, unequal), 0.0, 10.0)
    assert found["output"] == pytest.approx(0.7)
    assert found["TTFT p50"] == pytest.approx(1000)
    assert found["TPOT"] == pytest.approx(1000)
    equal = [of(0, 1.0, [2.0, 3.0, 4.0], 4), of(0, 5.0, [6.0, 7.0, 8.0], 4)]
    assert summary(Came(0.0, equal), 0.0, 10.0)["output"] == pytest.approx(1.0)
    open_still = [*equal, dataclasses.replace(of(1, 6.0, [9.0], -1), cut=True)]
    assert summary(Came(0.0, open_still), 0.0, 10.0)["output by event"] == pytest.approx(1.0)


def test_runs_give_their_median_and_range(capsys):
    runs = {"4 streams of conversations": [{"TPOT": value} for value in (6.0, 9.0, 7.0)]}
    name = "4 streams of conversations, TPOT"
    assert gpu_serve.medians(runs["4 streams of conversations"]) == {"TPOT": 7.0}
    ranges = {name: gpu_serve.range_of(runs, name)}
    assert ranges == {name: [6.0, 9.0]}
    targets.show("title", {name: 7.0}, targets.SERVE["8b"], {}, ranges)
    assert "MISSED 0.90x  6 to 9" in capsys.readouterr().out


class Emitted:
    """The engine that Deliveries wraps: it delivers a step's news in two slices."""

    def __init__(self) -> None:
        backend = SimpleNamespace(launcher=SimpleNamespace())
        runtime = SimpleNamespace(executor=SimpleNamespace(backend=backend))
        self._device = SimpleNamespace(settler=SimpleNamespace(settle=None), on_output=None, runtime=runtime)
        self.outputs: deque[StepOutput] = deque()

    def inspect(self) -> SimpleNamespace:
        return self._device

    def on_output(self, output: StepOutput) -> None:
        self.outputs.append(output)
        self.deliver_slice()

    def deliver_slice(self) -> None:
        output = self.outputs[0]
        output.start += 2
        if output.start < len(output.ids):
            asyncio.get_running_loop().call_soon(self.deliver_slice)
        else:
            self.outputs.popleft()


async def test_tokens_are_followed_from_the_newest_step_and_from_those_before_it():
    engine = Emitted()
    watch = Deliveries(engine)  # type: ignore[arg-type]
    launcher = engine.inspect().runtime.executor.backend.launcher
    for step, waited, ended in ((5, 5, 100.0), (6, 7, 100.5), (7, 7, 100.5)):  # 6 is settled after 7 has ended
        launcher.waited_step, launcher.ended_at = waited, ended
        output = StepOutput(StepStats(step_id=step, device_s=0.2))
        for token in (1, -1, 2):
            output.add(1, token, 0)
        engine.on_output(output)
        for _ in range(3):
            await asyncio.sleep(0)
        assert not engine.outputs
    times = watch.times()
    assert (times[:, 0] - times[:, 1]).tolist() == pytest.approx([100.0, 100.0, 100.3, 100.3, 100.5, 100.5])
    assert times[:, 2].tolist() == [1, 1] * 3
    assert np.all(np.diff(times[:, 0]) >= 0)


def test_a_step_without_a_known_end_has_no_time():
    steps = np.array(array("d", (3, np.nan, 0.1, 5, np.nan, 0.1, 6, 9.0, 0.5))).reshape(-1, 3)
    assert homes(steps) == {6: 9.0, 5: 8.5, 4: 8.4}


@pytest.mark.parametrize("way", ["ring", "call"])
def test_a_turns_writes_are_in_the_socket_when_the_next_one_begins(way):
    """Deliveries relies on this order of uvloop, for both ways in which news reach the loop."""

    async def work() -> bytes:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with theirs:
            theirs.setblocking(False)
            transport, _ = await loop.create_connection(asyncio.Protocol, sock=ours)
            read: asyncio.Future[bytes] = loop.create_future()

            def news() -> None:
                loop.call_soon(lambda: read.set_result(theirs.recv(100)))
                transport.write(b"token")

            ring = os.eventfd(way == "ring")
            loop.add_reader(ring, lambda: (os.eventfd_read(ring), news()))
            if way == "call":
                loop.call_soon_threadsafe(news)
            try:
                return await read
            finally:
                loop.remove_reader(ring)
                os.close(ring)
                transport.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(work()) == b"token"
