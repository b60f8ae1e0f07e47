"""A batch's lines: each is answered once, whatever ends the process or fills the disk."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import orjson
import pytest
import pytest_asyncio

from server.batches import run as module
from server.batches.answers import Answers
from server.batches.batches import Batches, Server
from server.batches.files import Files
from server.batches.folder import Folder
from server.batches.inside import Reply
from server.batches.records import BatchRecord, FileRecord
from tests.server.batches.test_lines import CHAT, line

pytestmark = pytest.mark.asyncio(loop_scope="session")
USAGE = b'{"usage": {"prompt_tokens": 3, "completion_tokens": 2}}'


@pytest.fixture(autouse=True)
def short_times(monkeypatch):
    monkeypatch.setattr(module, "FLUSH_S", 0.001)
    monkeypatch.setattr(module, "RETRY_S", 0.001)


class Process:
    """The batches of one process over a folder; `asked` has the bodies of answered lines."""

    def __init__(self, path, window=4, most_bytes=1 << 20, keys=("",)) -> None:
        self.pool = ThreadPoolExecutor(2)
        self.batches = Batches(Files(Folder(str(path)), most_bytes, 100.0, self.pool))
        self.batches.open()
        self.asked: Counter[str] = Counter()
        self.hold = asyncio.Event()
        self.hold.set()
        self.running = self.most_running = 0
        self.begun = asyncio.Event()
        self.statuses: dict[str, list[int]] = {}
        self.broken: set[str] = set()
        self.binary: set[str] = set()
        self.keys = set(keys)
        self.window = window

    def start(self):
        knows = self.keys.__contains__
        self.batches.start(Server(self.ask, lambda name: "", knows, self.window, 4096))
        return self

    async def ask(self, key, url, body):
        name = orjson.loads(body)["name"]
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        self.begun.set()
        try:
            await self.hold.wait()
            await asyncio.sleep(0)
        finally:
            self.running -= 1
        self.asked[name] += 1
        if name in self.broken:
            raise RuntimeError("broken")
        status = self.statuses[name].pop(0) if self.statuses.get(name) else 200
        return Reply(status, "id", USAGE, 0.0, name not in self.binary)

    async def upload(self, count, key="", name="file-in"):
        lines = b"".join(line(f"l{k}", body={"name": f"l{k}"}) + b"\n" for k in range(count))
        self.batches.files.place_of(name).write_bytes(lines)
        self.batches.files.reserve(key, len(lines))
        await self.batches.files.add(
            FileRecord(id=name, key=key, filename="in", purpose="batch", bytes=len(lines), created_at=1)
        )

    async def batch(self, key="", name="batch_1", expires_at=2**40, file="file-in"):
        record = BatchRecord(
            id=name, key=key, endpoint=CHAT, input_file_id=file, completion_window="24h", created_at=1,
            expires_at=expires_at, outputs=f"file-out{name}", errors=f"file-err{name}",
        )  # fmt: skip
        await self.batches.add(record)
        return record

    def lines(self, name):
        path = self.batches.files.place_of(name)
        return [orjson.loads(data) for data in path.read_bytes().splitlines()] if path.exists() else []

    def size(self, name):
        return self.batches.files.place_of(name).stat().st_size

    async def end(self):
        await self.batches.stop()
        self.batches.files.folder.close()
        self.pool.shutdown()


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 (tasks and threads change it)
            await asyncio.sleep(0.001)


@pytest_asyncio.fixture(loop_scope="session")
async def process(tmp_path):
    made = Process(tmp_path).start()
    yield made
    await made.end()


async def test_lines_run_in_the_window_and_every_one_is_answered_once(process):
    await process.upload(50)
    record = await process.batch()
    await until(lambda: record.ended)
    assert (record.status, record.total, record.completed, record.failed) == ("completed", 50, 50, 0)
    assert set(process.asked.values()) == {1}
    assert process.most_running == 4
    out = process.lines(record.outputs)
    assert {each["custom_id"] for each in out} == {f"l{k}" for k in range(50)}
    assert out[0]["response"] == {"status_code": 200, "request_id": "id", "body": orjson.loads(USAGE)}
    assert record.public()["usage"]["total_tokens"] == 250
    file = process.batches.files.get("", record.outputs)
    assert (file.purpose, file.bytes) == ("batch_output", process.size(file.id))
    assert record.public()["error_file_id"] is None


async def test_errors_have_a_file_and_a_full_server_is_asked_again(process):
    process.statuses = {"l1": [400], "l2": [429, 503, 200]}
    await process.upload(4)
    record = await process.batch()
    await until(lambda: record.ended)
    assert (record.completed, record.failed, process.asked["l2"]) == (3, 1, 3)
    (wrong,) = process.lines(record.errors)
    assert (wrong["custom_id"], wrong["response"]["status_code"]) == ("l1", 400)


async def test_a_line_that_fails_or_has_no_json_fails_alone(process):
    process.broken, process.binary = {"l1"}, {"l3"}
    await process.upload(5)
    record = await process.batch()
    await until(lambda: record.ended)
    assert (record.status, record.completed, record.failed) == ("completed", 3, 2)
    wrong = {each["custom_id"]: each["error"]["code"] for each in process.lines(record.errors)}
    assert wrong == {"l1": "internal_error", "l3": "invalid_body"}


async def test_a_stop_loses_no_answer_and_the_next_process_goes_on(tmp_path):
    first = Process(tmp_path, window=2).start()
    await first.upload(300)
    record = await first.batch()
    await until(lambda: first.asked.total() >= 7)
    first.hold.clear()
    await until(lambda: first.running == 2)
    await first.end()
    assert first.running == 0
    outputs = tmp_path / "files" / record.outputs
    outputs.write_bytes(outputs.read_bytes() + b'{"custom_id": "l299", "respon')  # the end of the process cut it
    second = Process(tmp_path).start()
    again = second.batches.get("", record.id)
    assert again.status == "in_progress"
    await until(lambda: again.ended)
    assert (again.status, again.completed, again.usage.output) == ("completed", 300, 600)
    assert (first.asked + second.asked) == Counter({f"l{k}": 1 for k in range(300)})
    assert sorted(each["custom_id"] for each in second.lines(again.outputs)) == sorted(f"l{k}" for k in range(300))
    await second.end()


async def test_a_full_disk_holds_the_lines_until_there_is_room(process, monkeypatch):
    append, full = Answers.append, asyncio.Event()

    def failing(self, lines):
        if not full.is_set():
            raise OSError(28, "No space left on device")
        append(self, lines)

    monkeypatch.setattr(Answers, "append", failing)
    await process.upload(200)
    record = await process.batch()
    await until(lambda: process.asked.total() > 1)
    before = -1
    while before != process.asked.total():  # no further line begins
        before = process.asked.total()
        await asyncio.sleep(0.05)
    assert before < 200
    assert record.status == "in_progress"
    full.set()
    await until(lambda: record.ended)
    assert (record.status, set(process.asked.values())) == ("completed", {1})
    assert len(process.lines(record.outputs)) == 200


async def test_a_write_that_fails_in_the_middle_leaves_whole_lines(tmp_path, monkeypatch):
    answers = Answers(tmp_path / "out")
    answers.append([b'{"custom_id":"a"}\n'])
    pwrite = os.pwrite

    def short(handle, view, at):
        if at > answers.size:
            raise OSError(28, "No space left on device")
        return pwrite(handle, view[:5], at)

    monkeypatch.setattr("server.batches.answers.os.pwrite", short)
    with pytest.raises(OSError, match="No space"):
        answers.append([b'{"custom_id":"b"}\n'])
    assert (tmp_path / "out").read_bytes() == b'{"custom_id":"a"}\n'


async def test_a_share_of_the_bytes_that_is_used_up_holds_the_lines(process):
    await process.upload(10)
    files = process.batches.files
    files.bytes.limit = files.bytes.used + 100
    record = await process.batch()
    await until(lambda: process.asked)
    assert record.status in ("validating", "in_progress")
    files.bytes.limit = 1 << 20
    await until(lambda: record.ended)
    assert (record.completed, files.bytes.used) == (
        10,
        sum(map(os.path.getsize, map(files.place_of, ("file-in", record.outputs)))),
    )


@pytest.mark.parametrize("held", [True, False])
async def test_a_cancelled_batch_has_the_answers_so_far(process, held):
    process.hold.clear()
    await process.upload(300)
    record = await process.batch()
    await process.begun.wait()
    other = await process.batch(name="batch_2")
    if not held:
        process.hold.set()
        await until(lambda: record.completed >= 3)
        process.hold.clear()
    await process.batches.cancel(other)  # it waits behind the first
    assert other.status == "cancelled"
    await process.batches.cancel(record)
    await until(lambda: record.ended)
    await process.batches.cancel(record)
    assert (record.status, process.running) == ("cancelled", 0)
    assert len(process.lines(record.outputs)) == record.completed == (0 if held else record.completed)
    assert (record.public()["output_file_id"] is None) is held


async def test_lines_that_run_out_of_time_are_named(process):
    process.hold.clear()
    await process.upload(5)
    record = await process.batch(expires_at=1)
    await until(lambda: record.ended)
    assert (record.status, record.failed) == ("expired", 5)
    late = process.lines(record.errors)
    assert {each["custom_id"] for each in late} == {f"l{k}" for k in range(5)}
    assert {each["error"]["code"] for each in late} == {"batch_expired"}


async def test_a_removed_key_ends_its_batch(process):
    process.keys.add("k")
    await process.upload(9, key="k")
    process.hold.clear()
    record = await process.batch(key="k")
    await process.begun.wait()
    process.keys.remove("k")
    process.hold.set()
    await until(lambda: record.ended)
    assert (record.status, record.problems[0].code) == ("failed", "key_removed")
    assert process.asked.total() < 9


async def test_keys_share_the_window_and_a_key_runs_one_batch_at_a_time(tmp_path):
    process = Process(tmp_path, window=2, keys=("a", "b")).start()
    process.hold.clear()
    for key in "ab":
        await process.upload(20, key=key, name=f"file-{key}")
    first = await process.batch("a", "batch_1", file="file-a")
    second = await process.batch("a", "batch_2", file="file-a")
    other = await process.batch("b", "batch_3", file="file-b")
    await until(lambda: process.running == 2)
    process.hold.set()
    await until(lambda: other.completed >= 10)
    assert not first.ended
    assert second.status == "validating"
    await until(lambda: second.ended)
    assert process.asked == Counter({f"l{k}": 3 for k in range(20)})
    await process.end()


async def test_a_deleted_input_fails_the_batch(process):
    record = await process.batch()
    await until(lambda: record.ended)
    assert (record.status, record.problems[0].code) == ("failed", "input_file_missing")
