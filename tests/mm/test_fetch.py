"""Fetching over a real socket: attacks of a hostile server, and no resources left open (SECURITY S14-S16; R17)."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from mm.errors import MediaError
from mm.fetch import Fetcher
from mm.limits import MediaLimits

BODY = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 40
LISTED = ("127.0.0.1",)


class Server:
    """Answers each path with bytes written by hand; counts connections that are still open."""

    def __init__(self) -> None:
        self.port = 0
        self.seen: list[str] = []
        self.open = 0
        self.answers: dict[str, Callable[[asyncio.StreamWriter], object]] = {}

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            self.seen.append(head)
            path = head.split(" ")[1].partition("?")[0]
            answer = self.answers.get(path, plain(b"", "404 Not Found"))
            result = answer(writer)
            if asyncio.iscoroutine(result):
                await result
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.open -= 1
            writer.close()

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"


def plain(body: bytes, status: str = "200 OK", **headers: str) -> Callable[[asyncio.StreamWriter], None]:
    lines = {"Content-Length": str(len(body)), **{name.replace("_", "-"): value for name, value in headers.items()}}
    head = f"HTTP/1.1 {status}\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items()) + "\r\n"
    return lambda writer: writer.write(head.encode() + body)


@pytest.fixture(scope="module", autouse=True)
def few_objects() -> None:
    """Freezes the objects that earlier tests imported: collecting garbage among them took a second of each test."""
    gc.collect()
    gc.freeze()


@asynccontextmanager
async def served(**limits: object) -> AsyncIterator[tuple[Server, Fetcher]]:
    """A server and a fetcher; on leaving, no task, descriptor or fetch may be left."""
    gc.collect()
    tasks, descriptors = len(asyncio.all_tasks()), open_descriptors()
    server = Server()
    listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    server.port = listener.sockets[0].getsockname()[1]
    pool = ThreadPoolExecutor(2)
    given = {"allowed_media_domains": LISTED, "image_fetch_timeout": 2.0} | limits
    fetcher = Fetcher(MediaLimits(**given), pool)
    try:
        yield server, fetcher
        assert fetcher.open == 0
    finally:
        await fetcher.close()
        for _ in range(100):
            if server.open == 0:
                break
            await asyncio.sleep(0.01)
        listener.close()
        await listener.wait_closed()
        pool.shutdown()
    for _ in range(100):  # connections close over several iterations of the loop
        await asyncio.sleep(0.02)
        gc.collect()
        if (len(asyncio.all_tasks()), open_descriptors()) == (tasks, descriptors):
            break
    assert server.open == 0
    assert len(asyncio.all_tasks()) == tasks
    assert open_descriptors() == descriptors


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def count(size: int, status: int = 400) -> None:
    """A request's byte counter that never refuses."""


async def refusal(fetcher: Fetcher, url: str) -> MediaError:
    with pytest.raises(MediaError) as caught:
        await fetcher.fetch(url, "image", count)
    return caught.value


async def test_a_body_arrives_whole_and_is_counted() -> None:
    async with served() as (server, fetcher):
        server.answers["/a"] = plain(BODY)
        counted = []
        assert await fetcher.fetch(server.url("/a?x=%20y"), "image", lambda size, status: counted.append(size)) == BODY
        assert sum(counted) == len(BODY)
        head = server.seen[0]
        assert head.startswith("GET /a?x=%20y HTTP/1.1\r\n")
        assert f"Host: 127.0.0.1:{server.port}\r\n" in head
        assert "Accept-Encoding: identity\r\n" in head
        assert "Cookie" not in head
        assert "Authorization" not in head


async def test_redirects_are_followed_a_few_times() -> None:
    async with served() as (server, fetcher):
        server.answers["/end"] = plain(BODY)
        for hop, code in enumerate((301, 302, 303)):
            following = "/end" if hop == 2 else f"/{hop + 1}"
            server.answers[f"/{hop}"] = plain(b"", f"{code} Found", Location=following)
        assert await fetcher.fetch(server.url("/0"), "image", count) == BODY
        server.answers["/before"] = plain(b"", "307 Found", Location="/0")
        assert (await refusal(fetcher, server.url("/before"))).reason == "media_fetch_failed"


async def test_s14_circles_and_forbidden_redirects_end_alike() -> None:
    async with served() as (server, fetcher):
        server.answers["/circle"] = plain(b"", "302 Found", Location="/circle")
        places = (
            "http://10.0.0.1/",
            "http://localhost/",
            "file:///etc/passwd",
            "http://user@127.0.0.1/",
            "",
            "http://",
        )
        for number, place in enumerate(places):
            server.answers[f"/{number}"] = plain(b"", "302 Found", Location=place)
        errors = [await refusal(fetcher, server.url("/circle"))]
        errors += [await refusal(fetcher, server.url(f"/{number}")) for number in range(len(places))]
        assert {(error.status, error.reason, error.message) for error in errors} == {
            (422, "media_fetch_failed", "the media could not be fetched from its URL")
        }
        assert len(server.seen) == 4 + len(places)


async def test_cookies_are_not_sent_to_the_next_hop() -> None:
    async with served() as (server, fetcher):
        server.answers["/a"] = plain(b"", "302 Found", Location="/b", Set_Cookie="a=b; Path=/")
        server.answers["/b"] = plain(BODY)
        assert await fetcher.fetch(server.url("/a"), "image", count) == BODY
        assert "a=b" not in server.seen[1]


@pytest.mark.parametrize(
    "status", ["204 No Content", "206 Partial", "401 No", "404 No", "429 Busy", "500 Oh", "100 Go"]
)
async def test_other_statuses_fail(status: str) -> None:
    async with served(image_fetch_timeout=1.5) as (server, fetcher):
        server.answers["/a"] = plain(BODY if status[0] != "1" and status[:3] != "204" else b"", status)
        assert (await refusal(fetcher, server.url("/a"))).reason == "media_fetch_failed"


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate", "zstd", "gzip, identity"])
async def test_s15_compressed_answers_fail(encoding: str) -> None:
    async with served() as (server, fetcher):
        server.answers["/a"] = plain(BODY, Content_Encoding=encoding)
        assert (await refusal(fetcher, server.url("/a"))).reason == "media_fetch_failed"


async def test_s15_too_large_bodies_are_refused_by_length_or_while_they_stream() -> None:
    async with served(image_max_bytes=1000) as (server, fetcher):
        server.answers["/stated"] = plain(b"x" * 1001)
        endless = 0

        async def drip(writer: asyncio.StreamWriter) -> None:
            nonlocal endless
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            while endless < 10_000_000:
                writer.write(b"x" * 500)
                endless += 500
                await writer.drain()

        server.answers["/endless"] = drip
        server.answers["/exact"] = plain(b"x" * 1000)
        for path in ("/stated", "/endless"):
            error = await refusal(fetcher, server.url(path))
            assert (error.status, error.reason) == (422, "media_too_large")
        assert endless < 10_000_000
        assert len(await fetcher.fetch(server.url("/exact"), "image", count)) == 1000


async def test_lies_about_length_fail() -> None:
    async with served() as (server, fetcher):
        server.answers["/short"] = plain(BODY, Content_Length=str(len(BODY) + 10))
        server.answers["/twice"] = lambda writer: writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 9\r\n\r\nabcdefghi"
        )
        server.answers["/negative"] = plain(BODY, Content_Length="-5")
        server.answers["/empty"] = plain(b"")
        server.answers["/long"] = plain(BODY, Content_Length="8")
        for path in ("/short", "/twice", "/negative", "/empty", "/long"):
            assert (await refusal(fetcher, server.url(path))).reason == "media_fetch_failed", path


async def test_chunked_bodies_are_read_and_broken_ones_fail() -> None:
    async with served() as (server, fetcher):
        head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        server.answers["/good"] = lambda writer: writer.write(head + b"5\r\nabcde\r\n0\r\n\r\n")
        server.answers["/bad"] = lambda writer: writer.write(head + b"zz\r\nabcde\r\n0\r\n\r\n")
        server.answers["/cut"] = lambda writer: writer.write(head + b"500\r\nabcde")
        assert await fetcher.fetch(server.url("/good"), "image", count) == b"abcde"
        for path in ("/bad", "/cut"):
            assert (await refusal(fetcher, server.url(path))).reason == "media_fetch_failed"


async def test_garbage_resets_and_huge_headers_fail() -> None:
    async with served() as (server, fetcher):
        server.answers["/garbage"] = lambda writer: writer.write(b"\x00\xff\r\n\r\n")
        server.answers["/reset"] = lambda writer: writer.transport.abort()
        server.answers["/header"] = plain(BODY, X_Long="x" * 100_000)
        for path in ("/garbage", "/reset", "/header"):
            assert (await refusal(fetcher, server.url(path))).reason == "media_fetch_failed", path


@pytest.mark.parametrize("stage", ["before headers", "in headers", "in body"])
async def test_stalls_and_drips_end_at_the_timeout(stage: str) -> None:
    async with served(image_fetch_timeout=0.3) as (server, fetcher):
        refused, gone = asyncio.Event(), asyncio.Event()

        async def stall(writer: asyncio.StreamWriter) -> None:
            if stage != "before headers":
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10000\r\n" + (b"\r\n" if stage == "in body" else b""))
            while not refused.is_set() and not writer.is_closing():
                writer.write(b"X" if stage == "in body" else b"")
                await asyncio.sleep(0.02)
            gone.set()

        server.answers["/a"] = stall
        assert (await asyncio.wait_for(refusal(fetcher, server.url("/a")), 30)).reason == "media_fetch_failed"
        refused.set()
        await asyncio.wait_for(gone.wait(), 60)


@pytest.mark.parametrize("delay", [0.0, 0.001, 0.01, 0.03, 0.06, 0.1])
async def test_cancelling_at_any_moment_leaves_nothing(delay: float) -> None:
    async with served(image_fetch_timeout=5.0) as (server, fetcher):

        async def slow(writer: asyncio.StreamWriter) -> None:
            await asyncio.sleep(0.02)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10000\r\n\r\n")
            for _ in range(20):
                if writer.is_closing():
                    return
                writer.write(b"x" * 100)
                await asyncio.sleep(0.01)

        server.answers["/a"] = slow
        task = asyncio.create_task(fetcher.fetch(server.url("/a"), "image", count))
        await asyncio.sleep(delay)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert fetcher.open == 0


async def test_fetches_take_turns_in_all_and_per_host() -> None:
    async with served(media_max_fetches_per_host=2, image_fetch_timeout=5.0) as (server, fetcher):
        running, most = 0, 0

        async def slow(writer: asyncio.StreamWriter) -> None:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.02)
            running -= 1
            plain(BODY)(writer)

        server.answers["/a"] = slow
        bodies = await asyncio.gather(*(fetcher.fetch(server.url("/a"), "image", count) for _ in range(7)))
        assert bodies == [BODY] * 7
        assert most == 2
        assert fetcher._hosts == {}


async def test_no_turn_in_time_is_busy() -> None:
    async with served(media_max_fetches=1, image_fetch_timeout=0.1) as (server, fetcher):
        done = asyncio.Event()

        async def slow(writer: asyncio.StreamWriter) -> None:
            await done.wait()
            plain(BODY)(writer)

        server.answers["/a"] = slow
        first = asyncio.create_task(fetcher.fetch(server.url("/a"), "video", count))
        await asyncio.sleep(0.05)
        error = await refusal(fetcher, server.url("/a"))
        assert (error.status, error.reason) == (429, "media_busy")
        done.set()
        assert await first == BODY


async def file_outcome(root: Path, url: str, **limits: object) -> bytes | MediaError:
    with ThreadPoolExecutor(1) as pool:
        fetcher = Fetcher(MediaLimits(allowed_local_media_path=str(root), **limits), pool)
        try:
            return await fetcher.fetch(url, "image", count)
        except MediaError as error:
            return error


async def test_files_below_the_folder_are_read(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a b.png").write_bytes(BODY)
    assert await file_outcome(tmp_path, f"file://{tmp_path}/in/a%20b.png") == BODY
    assert await file_outcome(tmp_path / "in", f"file://{tmp_path}/in/a%20b.png") == BODY


async def test_s16_everything_else_on_the_disk_reads_like_nothing(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "deep").mkdir(parents=True)
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "rootless").mkdir()
    (tmp_path / "rootless" / "x").write_bytes(b"secret")
    (root / "link").symlink_to(tmp_path / "secret")
    (root / "folder").symlink_to(tmp_path)
    os.mkfifo(root / "pipe")
    before = open_descriptors()
    for path in ("missing", "deep", "link", "folder/secret", "pipe", "deep/../../secret", "%2e%2e/secret", "deep/x/y"):
        error = await file_outcome(root, f"file://{root}/{path}")
        assert isinstance(error, MediaError), path
        assert (error.status, error.reason) == (403, "media_url_not_allowed")
    for url in (f"file://{tmp_path}/secret", f"file://{tmp_path}/rootless/x", f"file://{root}", "file:///dev/zero"):
        error = await file_outcome(root, url)
        assert isinstance(error, MediaError), url
        assert error.reason == "media_url_not_allowed"
    assert open_descriptors() == before


async def test_large_files_are_refused_unread(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 1001)
    error = await file_outcome(tmp_path, f"file://{tmp_path}/a", image_max_bytes=1000)
    assert isinstance(error, MediaError)
    assert error.reason == "media_too_large"


async def test_slow_names_do_not_hold_up_the_lookups_of_others(monkeypatch):
    """40 lookups run at the same time, more than asyncio runs by default, and more than the two that uvloop runs."""
    together = threading.Barrier(40, timeout=10)

    def look_up(host, port, *rest, **more):
        together.wait()
        return [(0, 0, 0, "", ("10.0.0.1", port))]

    monkeypatch.setattr("socket.getaddrinfo", look_up)
    async with served(media_dns_timeout=20.0, image_fetch_timeout=20.0, allowed_media_domains=()) as (_, fetcher):
        fetches = (fetcher.fetch(f"http://host{number}.example/a", "image", count) for number in range(40))
        answers = await asyncio.gather(*fetches, return_exceptions=True)
    assert not together.broken
    assert {error.reason for error in answers} == {"media_fetch_failed"}
