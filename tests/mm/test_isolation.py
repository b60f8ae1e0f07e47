"""Decoders in processes of their own: equal items; a crash, excess of memory or a hang ends one request (S23; R24)."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mm.errors import MediaError
from mm.isolation import helper as helpers
from mm.isolation import wire
from mm.isolation.helper import Helper, HelperFailed
from mm.isolation.helpers import HelperCounts
from mm.isolation.mapped import COPIED_BYTES, array_in
from mm.item import MediaOptions, MediaRef
from mm.limits import MediaLimits
from mm.load import MediaLoader
from mm.open import Encoded
from mm.transform.image import Scale
from mm.transform.quiet import Cutting
from tests.mm import corpus, made
from tests.mm.test_corpus import EVERY_FRAME, LIMITS
from tests.mm.test_load import FILM, IMAGE, JPEG, PROCESSOR, SOUND, TURNED, loader, refusal

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="helpers need Linux")

ROOT = Path(__file__).parents[2]
WAV = made.sound(made.tone(1.0))
PICTURES = "data:video/jpeg;base64," + ",".join([JPEG.partition(",")[2]] * 3)  # a film
HEARD = MediaOptions(use_audio_in_video=True)


@asynccontextmanager
async def isolated(kinds: str = "all", **limits: object) -> AsyncIterator[MediaLoader]:
    """A loader with helper processes; on leaving, none of them may still run."""
    files = len(os.listdir("/proc/self/fd"))
    async with loader(media_isolation=kinds, **limits) as media:
        yield media
    assert children() == []
    assert len(os.listdir("/proc/self/fd")) <= files + 1  # the pool's first thread may hold one


def is_alive(pid: int) -> bool:
    """Whether the process runs; False for a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children(parent: int | None = None) -> list[int]:
    """Ids of the decoder processes of a parent (by default this process), including dead ones."""
    parent = parent or os.getpid()
    found = []
    for entry in os.listdir("/proc"):
        try:
            state = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split() if entry.isdigit() else []
            if state and int(state[1]) == parent and b"isolation" in Path(f"/proc/{entry}/cmdline").read_bytes():
                found.append(int(entry))
        except OSError:
            pass
    return found


class Watched:
    """A processor that runs `act` on the helper process when the helper requests a plan in the middle of its work."""

    def __init__(self, media: MediaLoader, act: Callable[[int], None]) -> None:
        self.acts = 1
        self._media, self._act = media, act
        media.processor = self

    def __getattr__(self, name: str) -> object:
        if name in ("plan_image", "plan_film") and self.acts:
            self.acts -= 1
            (helper,) = self._media.helpers.leased
            self._act(helper.pid)
        return getattr(PROCESSOR, name)


def addresses(pid: int) -> int:
    """Bytes of the process's address space."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * 4096


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


async def test_s23_items_are_those_of_the_pool_bit_for_bit() -> None:
    refs = [MediaRef("video", FILM), MediaRef("image", IMAGE), MediaRef("image", JPEG), MediaRef("image", TURNED)]
    refs += [MediaRef("audio", SOUND), MediaRef("video", PICTURES)]
    async with loader() as pool, isolated() as media:
        expected, got = await pool.load(refs, options=HEARD), await media.load(refs, options=HEARD)
        assert [len(item.parts) for item in got] == [2, 1, 1, 1, 1, 1]
        for one, other in zip(expected, got, strict=True):
            for part, same in zip(one.parts, other.parts, strict=True):
                assert part.num_tokens == same.num_tokens
                assert part.features.keys() == same.features.keys()
                for name, array in part.features.items():
                    assert array.dtype == same.features[name].dtype
                    assert np.array_equal(array, same.features[name]), name
        assert media.helpers.counts() == HelperCounts(busy=0, idle=2, started=2, ended=0)


async def test_s23_a_recording_is_that_of_the_pool() -> None:
    data = made.sound(made.tone(3.0), container="flac", codec="flac")
    cutting = Cutting(1.0, 0.0)
    async with loader() as pool, isolated(helper_processes=1) as media:
        async with pool.recording(data, cutting, b"") as one, media.recording(data, cutting, b"") as other:
            assert one.windows == other.windows
            assert np.array_equal(one._samples, other._samples)
        with pytest.raises(MediaError, match="cut short"):
            async with media.recording(data[:300], cutting, b""):
                pass
        assert media.helpers.counts().ended == 0


async def test_only_films_go_to_helpers_where_the_operator_says_so() -> None:
    async with isolated("video") as media:
        await media.load([MediaRef("image", IMAGE), MediaRef("audio", SOUND)])
        assert media.helpers.counts().started == 0
        await media.load([MediaRef("video", FILM)])
        assert media.helpers.counts() == HelperCounts(busy=0, idle=1, started=1, ended=0)


@pytest.mark.parametrize("ref", [MediaRef("image", IMAGE), MediaRef("video", FILM)])
async def test_s23_a_helper_that_dies_in_its_work_ends_that_request_alone(ref: MediaRef) -> None:
    async with isolated(helper_processes=1) as media:
        Watched(media, kill)
        error = await refusal(media, ref)
        assert (error.status, error.reason, error.message) == (400, "media_invalid", helpers.ENDED)
        assert len(await media.load([ref])) == 1
        assert media.helpers.counts() == HelperCounts(busy=0, idle=1, started=2, ended=1)


async def test_s23_a_helper_that_overruns_its_time_is_killed_and_replaced() -> None:
    async with isolated(helper_processes=1) as media:
        await media.load([MediaRef("video", FILM)])
        usual, media.limits = media.limits, replace(media.limits, video_decode_timeout=0.5)
        Watched(media, stop)
        error = await refusal(media, MediaRef("video", FILM), scope=b"other")  # a stopped process never answers
        assert (error.status, error.reason) == (400, "media_too_complex")
        media.limits, media.processor = usual, PROCESSOR
        assert len(await media.load([MediaRef("video", FILM)], scope=b"third")) == 1
        assert media.helpers.counts().started == 2


async def test_s23_a_client_that_leaves_ends_its_helpers_work(monkeypatch) -> None:
    """The thread that reads from the helper closes the descriptor: closed earlier, its number may name another file."""
    talking, closing, close = [], [], wire.Link.close
    monkeypatch.setattr(wire.Link, "close", lambda link: (closing.append(threading.get_ident()), close(link)))
    async with isolated(helper_processes=1) as media:
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()

        def act(pid: int) -> None:
            talking.append(threading.get_ident())
            stop(pid)
            loop.call_soon_threadsafe(stopped.set)

        Watched(media, act)
        task = asyncio.create_task(media.load([MediaRef("video", FILM)]))
        await stopped.wait()
        assert media.ledger()["media_helpers"] == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert media.ledger()["media_helpers"] == 0
    assert set(closing) == set(talking)


async def test_a_helper_that_no_process_is_made_for_leaves_no_descriptor(monkeypatch) -> None:
    def refused(*args: object, **kwargs: object) -> None:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(subprocess, "Popen", refused)
    async with isolated(helper_processes=1) as media:
        with pytest.raises(BlockingIOError):
            await media.load([MediaRef("image", IMAGE)])


@pytest.mark.parametrize("delay", [0.002, 0.03])
async def test_leaving_at_any_moment_leaves_nothing(delay: float) -> None:
    async with isolated(helper_processes=1) as media:
        task = asyncio.create_task(media.load([MediaRef("video", FILM), MediaRef("image", IMAGE)], options=HEARD))
        await asyncio.sleep(delay)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_s23_a_helper_that_needs_more_memory_than_it_may_have_is_replaced() -> None:
    large = made.data_url(made.png(np.zeros((3000, 4000, 3), np.uint8)), "image/png")
    async with isolated(helper_processes=1) as media:
        await media.load([MediaRef("image", IMAGE)])
        (helper,) = media.helpers._idle
        resource.prlimit(helper.pid, resource.RLIMIT_AS, (addresses(helper.pid) + (32 << 20),) * 2)
        error = await refusal(media, MediaRef("image", large))
        assert (error.status, error.reason) == (400, "media_invalid")
        assert "memory" in error.message or error.message == helpers.ENDED
        assert len(await media.load([MediaRef("image", large)])) == 1


async def test_a_helper_that_died_while_it_waited_is_no_files_fault() -> None:
    async with isolated(helper_processes=1) as media:
        await media.load([MediaRef("image", IMAGE)])
        (helper,) = media.helpers._idle
        kill(helper.pid)
        async with asyncio.timeout(20):
            while is_alive(helper.pid):  # noqa: ASYNC110 (no event to wait for)
                await asyncio.sleep(0.005)
        assert media.helpers.counts().idle == 0
        assert len(await media.load([MediaRef("image", JPEG)])) == 1


async def test_files_wait_for_their_turn_and_refusals_say_what_the_pools_say() -> None:
    films = [made.data_url(made.film(made.ramp(10 + more), 10), "video/mp4") for more in range(3)]
    cut = made.data_url(made.png(made.noise(60, 80))[:2000], "image/png")
    async with loader() as pool, isolated(helper_processes=1) as media:
        assert len(await media.load([MediaRef("video", film) for film in films])) == 3
        one, other = await refusal(pool, MediaRef("image", cut)), await refusal(media, MediaRef("image", cut))
        assert (one.status, one.reason, one.message) == (other.status, other.reason, other.message)
        assert media.helpers.counts() == HelperCounts(busy=0, idle=1, started=1, ended=0)


def test_s23_a_helper_sees_nothing_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_API_KEY", "secret")
    helper = Helper(MediaLimits(), PROCESSOR)
    helper.start()
    try:
        seen = Path(f"/proc/{helper.pid}")
        assert b"secret" not in (seen / "environ").read_bytes()
        assert len(os.listdir(seen / "fd")) == 4  # the helper's descriptors: its socket, and three of /dev/null
        assert os.getsid(helper.pid) == helper.pid  # a terminal's Ctrl-C does not reach it
        limits = {line.split("  ")[0]: line.split() for line in (seen / "limits").read_text().splitlines()}
        assert limits["Max address space"][3] == str(4 << 30)
        assert limits["Max core file size"][4] == "0"
        os.kill(helper.pid, signal.SIGTERM)  # a service manager sends SIGTERM to every process of the service
        assert helper.promised_seconds(Encoded(WAV, "wav", MediaLimits(), PROCESSOR, MediaOptions())) is not None
        loaded = (seen / "maps").read_text()
        assert "av.libs" in loaded or "libavcodec" in loaded
        assert not any(name in loaded for name in ("libtorch", "_fast", "libcuda"))
    finally:
        helper.end()


def test_s23_what_helpers_are_refused() -> None:
    code = """
import ctypes, os, platform, resource, signal, socket, subprocess, sys, threading
from mm.isolation import fence
waiting = threading.Event()
tried = []
other = threading.Thread(target=lambda: (waiting.wait(), tried.append(refused(socket.socket))))
def refused(call, *args):
    try: call(*args)
    except PermissionError: return True
    return False
def tgkill(process):
    number = {"x86_64": 234, "aarch64": 131}[platform.machine()]
    if ctypes.CDLL(None, use_errno=True).syscall(number, process, process, 0):
        raise OSError(ctypes.get_errno(), "tgkill")
other.start()
apart = fence.stand_apart()
if not fence.refuse_calls():
    print("none"); sys.exit()
waiting.set(); other.join()
calls = [(socket.socket,), (socket.socketpair,), (subprocess.run, ["true"]), (os.kill, os.getppid(), 0),
         (open, "/tmp/written", "w"), (os.unlink, "/tmp/written"), (os.mkdir, "/tmp/made"), (os.truncate, "/tmp/x", 0),
         (os.fork,), (os.mknod, "/tmp/made"), (tgkill, os.getppid()),
         (resource.prlimit, os.getppid(), resource.RLIMIT_CPU)]
if apart:
    calls += [(open, f"/proc/{os.getppid()}/mem", "rb")]
print(all([refused(*call) for call in calls] + tried), len(open("/proc/self/stat").read()) > 0)
tgkill(os.getpid()); resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
later = threading.Thread(target=print, args=("threads",)); later.start(); later.join()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout.split() in (["True", "True", "threads"], ["none"])


@pytest.mark.slow
def test_s43_helpers_end_with_a_server_that_is_killed() -> None:
    code = """
import os, signal
from mm.isolation.helper import Helper
from mm.limits import MediaLimits
from tests.mm.test_load import PROCESSOR
helper = Helper(MediaLimits(), PROCESSOR)
helper.start()
os.kill(helper.pid, signal.SIGSTOP)
print(helper.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    pid = int(done.stdout)
    for _ in range(1000):
        if not is_alive(pid):
            return
        time.sleep(0.02)
    raise AssertionError("it lives on")


class Claim:
    """A helper's message with arrays in memory files; the arguments make its claim true or false."""

    def __init__(self, *arrays: np.ndarray, sealed: bool = True, unscaled: bool = False, **changed: object) -> None:
        self.files = [wire.memory_file(array.tobytes(), sealed) for array in arrays]
        told = [wire.Array(array.dtype.name, array.shape) for array in arrays]
        if changed:
            told[0] = wire.Array(**{"dtype": told[0].dtype, "shape": told[0].shape, **changed})
        self.decoded = wire.Decoded(told, unscaled, ())


FRAMES = np.zeros((2, 28, 56, 3), np.uint8)
SAMPLES = np.zeros(100, np.float32)


@pytest.mark.parametrize(
    ("modality", "claim", "holds"),
    [
        ("video", lambda: Claim(FRAMES), True),
        ("video", lambda: Claim(FRAMES, SAMPLES), True),
        ("video", lambda: Claim(FRAMES.transpose(0, 2, 1, 3)), True),  # a rotated film
        ("video", lambda: Claim(FRAMES[:1]), False),
        ("video", lambda: Claim(FRAMES, sealed=False), False),  # the file could be truncated while it is read
        ("video", lambda: Claim(FRAMES, shape=(4, 28, 56, 3)), False),
        ("video", lambda: Claim(FRAMES, shape=(-2, -28, 56, 3)), False),
        ("video", lambda: Claim(FRAMES, dtype="float32"), False),
        ("video", lambda: Claim(FRAMES, SAMPLES[:, None]), False),
        ("video", lambda: Claim(), False),
        ("audio", lambda: Claim(SAMPLES), True),
        ("audio", lambda: Claim(SAMPLES, SAMPLES), False),
        ("audio", lambda: Claim(np.zeros(5001, np.float32)), False),  # more samples than were reserved
        ("image", lambda: Claim(FRAMES[0]), True),
        ("image", lambda: Claim(FRAMES[0, :27]), False),
        ("image", lambda: Claim(FRAMES[0], unscaled=True), False),
    ],
)
def test_what_a_helper_says_is_checked(modality, claim, holds) -> None:
    task = helpers._Task(modality, Encoded(b"", "", MediaLimits(), PROCESSOR, MediaOptions()))
    task._scale = Scale(28, 56)
    task._film = helpers.FilmPlan(np.arange(2), Scale(28, 56), 1.0)
    said = claim()
    item = task.item(said.decoded, said.files, wire.Header(20_000, 20_000, None))
    assert (item is not None) == holds
    wire.close_all(said.files)


def test_a_message_of_another_kind_ends_the_conversation() -> None:
    task = helpers._Task("audio", Encoded(b"", "", MediaLimits(), PROCESSOR, MediaOptions()))
    for question in (wire.PlanImage(10, 10), wire.PlanFilm(1, 1.0, 10, 10), wire.Ready(True)):
        with pytest.raises(wire.Ended):
            task.planned(question)
    wrong = [(0, 1.0, 9, 9), (1 << 40, 1.0, 9, 9), (9, 0.0, 9, 9), (9, float("nan"), 9, 9), (9, 1.0, 0, 9)]
    for numbers in (*wrong, (9, 1.0, 1 << 20, 1 << 20)):
        task = helpers._Task("video", Encoded(b"", "", MediaLimits(), PROCESSOR, MediaOptions()))
        with pytest.raises(wire.Ended):
            task.planned(wire.PlanFilm(*numbers))
    task = helpers._Task("image", Encoded(b"", "", MediaLimits(), PROCESSOR, MediaOptions()))
    assert task.planned(wire.PlanImage(1, 1 << 40)).reason == "media_invalid"


async def test_an_error_in_the_processor_leaves_no_helper_in_the_middle_of_a_question() -> None:
    async with isolated(helper_processes=1) as media:

        def fail(pid: int) -> None:
            raise ValueError("ours")

        Watched(media, fail)
        with pytest.raises(ValueError, match="ours"):
            await media.load([MediaRef("image", IMAGE)])
        assert len(await media.load([MediaRef("image", IMAGE)])) == 1
        assert media.helpers.counts() == HelperCounts(busy=0, idle=1, started=2, ended=1)


async def test_a_helper_that_does_not_start_says_which_flag() -> None:
    async with isolated(helper_memory_bytes=64 << 20) as media:
        with pytest.raises(HelperFailed, match="--helper-memory-bytes 67108864"):
            await media.load([MediaRef("image", IMAGE)])
        assert media.helpers.counts() == HelperCounts(busy=0, idle=0, started=1, ended=1)


@pytest.mark.full
@pytest.mark.timeout(900)
async def test_r24_two_hundred_helpers_are_killed_in_their_work() -> None:
    async with isolated(helper_processes=1) as media:
        refs = [MediaRef("image", IMAGE), MediaRef("video", FILM)]
        for count in range(200):
            Watched(media, kill)
            assert (await refusal(media, refs[count % 2])).reason == "media_invalid"
            media.processor = PROCESSOR
            began = time.monotonic()
            assert len(await media.load([refs[count % 2]], scope=bytes([count]))) == 1
            assert time.monotonic() - began < 2
        assert len(children()) == 1


@pytest.mark.parametrize("length", [100, COPIED_BYTES])
def test_arrays_outlive_the_file_that_they_came_in(length: int) -> None:
    files = len(os.listdir("/proc/self/fd"))
    made_here = np.random.default_rng(0).integers(0, 256, length, np.uint8)
    described, file = wire.array_file(made_here)
    array = array_in(file, np.dtype(np.uint8), described.shape, length)
    os.close(file)
    assert len(os.listdir("/proc/self/fd")) == files
    part = array[1:]
    del array
    assert np.array_equal(part, made_here[1:])
    part[0] ^= 1  # writable: the array has memory of its own, like an array made here


@pytest.mark.full
async def test_every_odd_file_is_read_or_refused_as_in_the_pool() -> None:
    async with loader(**LIMITS) as pool, isolated(**LIMITS) as media:
        for odd in corpus.odd_files():
            found = []
            for reader in (pool, media):
                try:
                    (item,) = await reader.load([MediaRef(odd.modality, odd.data)], options=EVERY_FRAME)
                except MediaError as error:
                    found.append((error.status, error.reason, error.message))
                else:
                    arrays = [array.tobytes() for part in item.parts for array in part.features.values()]
                    found.append((item.replaced, arrays))
            assert found[0] == found[1], odd.name
        assert media.helpers.counts().started == 1
