"""/v1/files: uploads that go to the disk, lists by key, deletion, limits; with the official client on a socket."""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from engine.base.errors import ConfigError
from server.batches import files as stored_files
from server.batches.files import Files
from server.batches.folder import Folder
from server.batches.upload import Upload
from tests.server.live import listening

pytestmark = pytest.mark.asyncio(loop_scope="session")

LINE = b'{"custom_id": "a"}\n'
BOUNDARY = "cut-here"
HEADERS = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}


def form(content=LINE, filename="in.jsonl", **texts):
    """A form with a file behind its texts."""
    parts = [f'name="{name}"\r\n\r\n{text}\r\n'.encode() for name, text in ({"purpose": "batch"} | texts).items()]
    parts.append(f'name="file"; filename="{filename}"\r\n\r\n'.encode() + content + b"\r\n")
    begin = f"--{BOUNDARY}\r\nContent-Disposition: form-data; ".encode()
    return b"".join(begin + part for part in parts) + f"--{BOUNDARY}--\r\n".encode()


async def upload(client, body=None, **headers):
    return await client.post("/v1/files", body=form() if body is None else body, headers={**HEADERS, **headers})


def on_disk(client):
    """Names in the folder of contents."""
    return set(os.listdir(client.state.batches.files.folder.root / "files"))


async def test_the_official_client_stores_lists_reads_and_deletes(serve, tmp_path):
    client = serve(server={"api_key": ("secret",)}, batches={"files_dir": str(tmp_path)})
    client.state.batches.files.folder.open()
    content = LINE * 200_000  # larger than a buffer
    async with listening(client) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="secret") as api:
        first = await api.files.create(file=("in.jsonl", content), purpose="batch")
        assert (first.filename, first.bytes, first.purpose) == ("in.jsonl", len(content), "batch")
        assert first.expires_at is None
        hour = {"anchor": "created_at", "seconds": 3600}
        second = await api.files.create(file=("b", LINE), purpose="batch", expires_after=hour)
        assert second.expires_at == second.created_at + 3600
        third = await api.files.create(file=("c", LINE), purpose="batch")
        assert await api.files.retrieve(first.id) == first
        assert (await api.files.content(first.id)).content == content
        names = [file.id async for file in await api.files.list(limit=2)]
        assert names == [third.id, second.id, first.id]
        assert [file.id async for file in await api.files.list(order="asc", purpose="batch")] == names[::-1]
        assert (await api.files.delete(first.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await api.files.retrieve(first.id)
    assert on_disk(client) == {name + end for name in (second.id, third.id) for end in ("", ".json")}
    client.state.batches.files.folder.close()


async def test_s07_a_key_has_its_own_files(serve):
    client = serve(server={"api_key": ("one", "two")})
    name = (await upload(client, **{"x-api-key": "one"})).json()["id"]
    theirs, ours = {"x-api-key": "two"}, {"x-api-key": "one"}
    assert (await client.get("/v1/files", headers=theirs)).json()["data"] == []
    for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        reply = await client.call(method, f"/v1/files/{name}{path}", headers=theirs).finish()
        assert (reply.status, reply.error["reason"]) == (404, "not_found")
    assert (await client.get(f"/v1/files/{name}/content", headers=ours)).content == LINE
    assert (await client.get("/v1/files?after=" + name, headers=theirs)).status == 400


async def test_the_form_s_fields_are_checked_by_name(client):
    anchor, seconds = "expires_after[anchor]", "expires_after[seconds]"
    for texts, param in (
        ({"purpose": "vision"}, "purpose"),
        ({anchor: "later"}, anchor),
        ({seconds: "3599"}, seconds),
        ({seconds: "2592001"}, seconds),
        ({seconds: "soon"}, seconds),
    ):
        reply = await upload(client, form(**texts))
        assert (reply.status, reply.error["param"]) == (400, param)
    assert (await upload(client, form(b""))).error["param"] == "file"
    assert (await upload(client, form(**{anchor: "created_at", seconds: "3600"}))).status == 200
    named = (await upload(client, form(filename="../../etc/passwd"))).json()
    assert named["filename"] == "passwd"
    for query in ("limit=0", "limit=10001", "limit=x", "order=up", "after=file-x", "purpose=vision"):
        assert (await client.get(f"/v1/files?{query}")).status == 400


async def test_s04_an_upload_is_counted_as_it_arrives_and_leaves_nothing(serve):
    client = serve(batches={"max_batch_file_bytes": 4096, "files_bytes": 9000})
    for _ in range(2):
        assert (await upload(client, form(b"x" * 4096))).status == 200
    before = on_disk(client)
    for size, status, reason in ((809, 413, "storage_full"), (4097, 413, "request_too_large")):
        body = form(b"x" * size)
        reply = await upload(client, [body[at : at + 512] for at in range(0, len(body), 512)])
        assert (reply.status, reply.error["reason"]) == (status, reason)
        client.state.batches.files.bytes.limit = 20_000
    cut = await upload(client, form()[:-20])
    assert cut.error["reason"] == "invalid_multipart"
    held = client.state.batches.files
    assert on_disk(client) == before
    assert (held.bytes.used, held.uploads.used, client.state.body_budget.used) == (8192, 0, 0)


async def test_an_upload_that_its_client_leaves_is_removed(client, monkeypatch):
    monkeypatch.setattr("server.batches.upload.Upload.flush.__defaults__", (1,))
    call = client.call("POST", "/v1/files", body=form(LINE * 100)[:900], headers=HEADERS)
    receive, written = call.receive, []

    async def unfinished():
        written.extend(on_disk(client) if client.state.batches.files.folder.is_open else ())
        return await receive() | {"more_body": True}

    call.receive = unfinished
    call.leave()
    await call.finish()
    assert len(written) == 1
    assert (on_disk(client), client.state.batches.files.bytes.used) == (set(), 0)


async def test_as_many_uploads_run_as_may_be_buffered(client, monkeypatch):
    uploads = client.state.batches.files.uploads
    uploads.take_any("other", stored_files.MOST_UPLOADS)
    refused = await upload(client)
    assert (refused.status, refused.error["reason"]) == (429, "queue_full")
    uploads.give("other", stored_files.MOST_UPLOADS)
    assert (await upload(client)).status == 200


async def test_a_full_disk_is_503_and_the_server_goes_on(client, monkeypatch):
    def full(fd):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("server.batches.upload.os.fsync", full)
        reply = await upload(client)
    assert (reply.status, reply.error["reason"]) == (503, "storage_failed")
    assert (on_disk(client), client.state.batches.files.bytes.used) == (set(), 0)
    assert (await upload(client)).status == 200


async def test_expired_files_are_gone(client, monkeypatch):
    file = (await upload(client, form(**{"expires_after[seconds]": "3600"}))).json()
    name, end = file["id"], file["expires_at"]
    assert end == file["created_at"] + 3600
    monkeypatch.setattr("server.batches.files.time.time", lambda: end - 1)
    assert (await client.get(f"/v1/files/{name}")).status == 200
    monkeypatch.setattr("server.batches.files.time.time", lambda: end + 1)
    assert (await client.get(f"/v1/files/{name}")).status == 404
    assert client.state.batches.files.bytes.used == client.state.batches.files.count.used == 0


async def test_a_start_finds_the_files_and_removes_what_a_crash_left(serve, tmp_path):
    client = serve(batches={"files_dir": str(tmp_path)})
    first = client.state.batches.files
    first.folder.open()
    name = (await upload(client)).json()["id"]
    (tmp_path / "files" / "file-cut").write_bytes(b"half")
    (tmp_path / "files" / "file-old.new").write_bytes(b"{")
    (tmp_path / "files" / "file-bad.json").write_bytes(b"{")
    with pytest.raises(ConfigError, match="another server uses this folder"):
        Folder(str(tmp_path)).open()
    first.folder.close()
    again = Files(Folder(str(tmp_path)), 1 << 20, 3.0, client.state.pool)
    again.folder.open()
    again.open()
    assert again.get("", name).bytes == again.bytes.used == len(LINE)
    assert sorted(os.listdir(tmp_path / "files")) == sorted([name, f"{name}.json", "file-bad.json"])
    again.folder.close()


async def test_a_folder_that_cannot_be_made_ends_the_start(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"--files-dir .*name a folder"):
        Folder(str(tmp_path / "file")).open()


async def test_a_private_folder_ends_with_its_server(client):
    await upload(client)
    folder = client.state.batches.files.folder
    assert folder.root.is_dir()
    folder.close()
    assert not folder.root.exists()


async def test_a_client_that_leaves_during_a_write_leaves_no_file(tmp_path, monkeypatch):
    files = Files(Folder(str(tmp_path)), 1 << 30, 1.0, ThreadPoolExecutor(2))
    begun, gate, place_of = threading.Event(), threading.Event(), files.place_of

    def slow(name):
        begun.set()
        assert gate.wait(30)
        return place_of(name)

    monkeypatch.setattr(files, "place_of", slow)

    async def client():
        async with Upload(files, "key", "client") as upload:
            upload.write(memoryview(LINE))
            await upload.flush(0)

    left = asyncio.ensure_future(client())
    await asyncio.to_thread(begun.wait, 30)
    left.cancel()
    for _ in range(10):
        await asyncio.sleep(0)
    await asyncio.wrap_future(files.pool.submit(int))  # all that was submitted before has ended, without the write
    gate.set()
    await asyncio.wait([left])
    files.pool.shutdown()
    assert left.cancelled()
    assert not os.listdir(tmp_path / "files")
    assert (files.bytes.used, files.uploads.used) == (0, 0)
