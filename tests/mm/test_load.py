"""The loader: limits before work, results in order, bounded memory, no leaks (S15, S17, S22, S23; R18)."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

import mm.item_job as jobs
import mm.load as loading
from mm.decode import video
from mm.decode.alarm import Alarm
from mm.decode.image import ImageFile
from mm.errors import MediaError
from mm.item import MediaOptions, MediaRef
from mm.limits import MediaLimits
from mm.load import MediaLoader
from mm.processors.registry import processor_for
from tests.mm import made

EMBEDDED = Path(__file__).parents[2] / "server" / "embedded"
RAW = json.loads((EMBEDDED / "config.json").read_text())
OMNI = "qwen_omni:QwenOmni"
PROCESSOR = processor_for(OMNI, EMBEDDED, RAW)
IMAGE = made.data_url(made.png(made.noise(60, 80)), "image/png")
JPEG = made.data_url(made.picture(made.noise(60, 80), "JPEG"), "image/jpeg")
TURNED = made.data_url(
    made.picture(
        made.noise(40, 90), "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"
    ),
    "image/jpeg",
)
SOUND = made.data_url(made.sound(made.tone(1.0)), "audio/wav")
FILM = made.data_url(made.film(made.ramp(30), 10, track=made.tone(3.0)), "video/mp4")


@asynccontextmanager
async def loader(**limits: object) -> AsyncIterator[MediaLoader]:
    """A loader; on leaving, its ledger must be clean."""
    tasks = len(asyncio.all_tasks())
    pool = ThreadPoolExecutor(3)
    instance = MediaLoader(MediaLimits(**limits), PROCESSOR, pool)
    try:
        yield instance
    finally:
        for _ in range(500):
            if clean(instance):
                break
            await asyncio.sleep(0.01)
        assert clean(instance), instance.ledger()
        assert instance.permits.slots._value == instance.num_slots
        await instance.close()
        pool.shutdown()
    assert len(asyncio.all_tasks()) == tasks


@asynccontextmanager
async def scaling(picture_bytes: int = 60 * 80 * 3) -> AsyncIterator[MediaLoader]:
    """A loader for a device that scales pictures itself."""
    async with loader() as media:
        media.processor = processor_for(OMNI, EMBEDDED, RAW, picture_bytes=picture_bytes)
        yield media


def clean(instance: MediaLoader) -> bool:
    ledger = dict(instance.ledger())
    cached = ledger.pop("media_cache_bytes")
    return not any(ledger.values()) and cached <= instance.cache.capacity


async def refusal(instance: MediaLoader, *refs: MediaRef, **options: object) -> MediaError:
    with pytest.raises(MediaError) as caught:
        await instance.load(list(refs), **options)
    return caught.value


async def test_items_come_back_in_order() -> None:
    async with loader() as media:
        refs = [MediaRef("video", FILM), MediaRef("image", IMAGE), MediaRef("audio", SOUND), MediaRef("image", IMAGE)]
        processed = await media.load(refs)
        assert [item.modality for item in processed] == ["video", "image", "audio", "image"]
        film, image, sound, again = (item.parts[0] for item in processed)
        assert image.hash == again.hash
        assert len({part.hash for part in (film, image, sound)}) == 3
        assert all(len(part.hash) == 16 for part in (film, image, sound))
        assert film.features["second_per_grid"].tolist() == [1.0]
        assert sound.features["input_features"].shape == (80, 100)
        assert image.num_tokens == int(image.features["grid_thw"].prod()) // 4
        assert image.features["pixel_values"].dtype == np.float32
        assert image.features["grid_thw"].dtype == np.int64


@pytest.mark.parametrize(("budget", "num_decoders"), [(64 << 20, 3), (6 << 20, 1)])
async def test_films_take_memory_of_more_decoders_where_it_is_free(
    monkeypatch: pytest.MonkeyPatch, budget: int, num_decoders: int
) -> None:
    """Several decoders run only if half of all memory stays free for other requests."""
    monkeypatch.setattr(video, "_SPLIT_PIXELS", 0)
    monkeypatch.setattr(video, "num_threads", lambda *_: 4)
    used, real = [], video.FilmFile.decode

    def decode(film: video.FilmFile, alarm: Alarm, number: int = 1) -> np.ndarray:
        used.append(number)
        return real(film, alarm, number)

    monkeypatch.setattr(video.FilmFile, "decode", decode)
    film = made.data_url(made.film(made.ramp(30), 10, options={"g": "10"}), "video/mp4")
    async with loader(decoded_budget_bytes=budget) as media:
        await media.load([MediaRef("video", film)])
    assert used == [num_decoders]


async def test_pictures_stay_as_they_were_decoded_where_a_device_scales_them() -> None:
    async with scaling() as media:
        (whole,), (upright,) = (
            await media.load([MediaRef("image", IMAGE)]),
            await media.load([MediaRef("image", TURNED)]),
        )
        large = made.data_url(made.png(made.noise(61, 80)), "image/png")
        (scaled,) = await media.load([MediaRef("image", large)])
        assert whole.parts[0].features["pixels"].shape == (1, 60, 80, 3)
        assert upright.parts[0].features["pixels"].shape == (1, 90, 40, 3)
        height, width = scaled.parts[0].features["pixels"].shape[1:3]
        assert (height % 28, width % 28) == (0, 0)
        for item in (whole, upright, scaled):
            rows, columns = (item.parts[0].features[name].shape[1] for name in ("rows", "columns"))
            assert rows * columns == item.parts[0].num_tokens * 28 * 28


class Turns:
    """Counts the calls into the pool, and the items that were decoded there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = self.decoded = 0
        in_pool, finish = jobs.ItemJob._in_pool, jobs.ItemJob._finish

        async def counted(job, *args, **options):
            self.count += 1
            return await in_pool(job, *args, **options)

        def decoded(*args):
            self.decoded += 1
            return finish(*args)

        monkeypatch.setattr(jobs.ItemJob, "_in_pool", counted)
        monkeypatch.setattr(jobs.ItemJob, "_finish", decoded)


async def test_a_jpeg_of_the_request_takes_one_turn_in_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns(monkeypatch)
    async with loader() as media:
        (first,) = await media.load([MediaRef("image", JPEG)])
        assert (turns.count, turns.decoded) == (1, 1)
        (second,) = await media.load([MediaRef("image", JPEG)])
        assert second is first
        assert (turns.count, turns.decoded) == (2, 1)
        assert (media.cache.hits, media.cache.queries) == (1, 2)
        both = await media.load([MediaRef("image", JPEG)] * 2, scope=b"a")
        assert both[0].parts[0].hash == both[1].parts[0].hash


@pytest.mark.parametrize("why", ["slots", "memory", "size", "kind"])
async def test_a_jpeg_that_cannot_be_decoded_at_once_waits_like_others(monkeypatch, why: str) -> None:
    turns = Turns(monkeypatch)
    source = JPEG
    async with loader(**({"decoded_budget_bytes": jobs.AT_ONCE - 1} if why == "memory" else {})) as media:
        held = []
        if why == "slots":
            held = [await media.permits.slots.acquire() for _ in range(media.num_slots)]
        elif why == "size":
            monkeypatch.setattr(jobs, "AT_ONCE", 1000)
        elif why == "kind":
            source = JPEG.replace("image/jpeg", "application/octet-stream")
        job = asyncio.create_task(media.load([MediaRef("image", source)]))
        if held:
            await asyncio.sleep(0.05)
            assert turns.decoded == 0
            for _ in held:
                media.permits.slots.release()
        assert len(await job) == 1
        assert (turns.count, turns.decoded) == (2, 1)


async def test_a_first_decoder_at_work_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    go, decode = threading.Event(), ImageFile.decode
    monkeypatch.setattr(ImageFile, "decode", lambda *args: (go.wait(60), decode(*args))[1])
    async with scaling() as media:
        reports = [asyncio.get_running_loop().create_future() for _ in range(2)]
        first = asyncio.create_task(media.load([MediaRef("image", JPEG)], decoding=reports[0]))
        await reports[0]
        second = asyncio.create_task(media.load([MediaRef("image", JPEG)], scope=b"b", decoding=reports[1]))
        await reports[1]  # reported at once, because another request already loads media
        assert not first.done()
        assert not second.done()
        go.set()
        await asyncio.gather(first, second)


@pytest.mark.parametrize("why", ["kind", "turned", "scaled", "known", "two", "no slot"])
async def test_a_text_never_waits_for_a_decoder_that_has_no_slot_or_is_not_needed(why: str) -> None:
    refs = [MediaRef("image", {"kind": IMAGE, "turned": TURNED}.get(why, JPEG))] * (2 if why == "two" else 1)
    async with scaling(1000 if why == "scaled" else 60 * 80 * 3) as media:
        decoding, held = asyncio.get_running_loop().create_future(), 0
        if why == "known":
            await media.load(refs)
        while why == "no slot" and not media.permits.slots.locked():
            held += await media.permits.slots.acquire()
        job = asyncio.create_task(media.load(refs, decoding=decoding))
        await decoding
        for _ in range(held):
            media.permits.slots.release()
        assert len(await job) == len(refs)


async def test_a_damaged_jpeg_leaves_its_place() -> None:
    async with loader() as media:
        data = made.picture(made.noise(60, 80), "JPEG")
        for broken, reason in ((data[: len(data) // 2], "media_invalid"), (data[:3], "media_invalid")):
            error = await refusal(media, MediaRef("image", made.data_url(broken, "image/jpeg"), param="here"))
            assert (error.status, error.reason, error.param) == (400, reason, "here")


async def test_no_media_is_no_work() -> None:
    async with loader() as media:
        assert await media.load([]) == []


async def test_bare_base64_and_uploads_are_read_too() -> None:
    data = made.sound(made.tone(0.5))
    async with loader() as media:
        bare = MediaRef("audio", made.data_url(data).partition(",")[2], format="wav")
        (first,), (second,) = await media.load([bare]), await media.load([MediaRef("audio", data)])
        assert first.parts[0].hash == second.parts[0].hash


async def test_the_same_bytes_under_other_settings_have_another_name() -> None:
    async with loader() as media:
        (plain,) = await media.load([MediaRef("image", IMAGE)])
        (small,) = await media.load([MediaRef("image", IMAGE)], options=MediaOptions(max_pixels=28 * 28 * 16))
        assert plain.parts[0].hash != small.parts[0].hash
        assert small.parts[0].num_tokens < plain.parts[0].num_tokens
        (large,) = await media.load([MediaRef("image", IMAGE)], options=MediaOptions(max_pixels=10**9))
        assert large.parts[0].num_tokens == plain.parts[0].num_tokens


async def test_films_have_their_sound_when_requested() -> None:
    async with loader() as media:
        (silent,) = await media.load([MediaRef("video", FILM)])
        (heard,) = await media.load([MediaRef("video", FILM)], options=MediaOptions(use_audio_in_video=True))
        assert [part.modality for part in silent.parts] == ["video"]
        assert [part.modality for part in heard.parts] == ["video", "audio"]
        assert heard.parts[0].hash != heard.parts[1].hash
        mute = made.data_url(made.film(made.ramp(8), 4), "video/mp4")
        (quiet,) = await media.load([MediaRef("video", mute)], options=MediaOptions(use_audio_in_video=True))
        assert [part.modality for part in quiet.parts] == ["video"]


async def test_fewer_frames_may_be_asked_for_but_not_more() -> None:
    async with loader(video_max_frames=4) as media:
        for asked, frames in ((2, 2), (4, 4), (100, 4)):
            (film,) = await media.load([MediaRef("video", FILM)], options=MediaOptions(num_frames=asked))
            assert int(film.parts[0].features["grid_thw"][0, 0]) * 2 == frames


@pytest.mark.parametrize(
    ("count", "limits", "reason"),
    [
        (65, {}, "too_many_media"),
        (3, {"limit_mm_per_prompt": {"image": 2}}, "too_many_media"),
        (1, {"limit_mm_per_prompt": {"image": 0}}, "too_many_media"),
        (2, {"limit_mm_per_prompt": {"image": 2, "video": 0}}, None),
    ],
)
async def test_items_are_counted_before_anything_is_read(count: int, limits: dict, reason: str | None) -> None:
    async with loader(**limits) as media:
        if reason is None:
            assert len(await media.load([MediaRef("image", IMAGE)] * count)) == count
        else:
            error = await refusal(media, *[MediaRef("image", "data:nonsense", param="messages[0]")] * count)
            assert (error.status, error.reason) == (400, reason)


async def test_kinds_the_model_lacks_are_refused_by_name() -> None:
    with ThreadPoolExecutor(1) as pool:
        media = MediaLoader(MediaLimits(), None, pool)
        error = await refusal(media, MediaRef("image", IMAGE, param="messages[1].content[0]"))
        assert (error.status, error.reason, error.param) == (400, "media_unsupported", "messages[1].content[0]")
        assert error.message == "this model does not read images"


@pytest.mark.parametrize(
    ("modality", "source", "status", "reason"),
    [
        ("image", "data:image/png;base64,", 400, "data_url_invalid"),
        ("image", "data:image/png;base64,AAA", 400, "data_url_invalid"),
        ("image", "data:image/png;base64,AA A", 400, "data_url_invalid"),
        ("image", "data:image/png;base64,AAAA\nAAAA", 400, "data_url_invalid"),
        ("image", "data:image/png;base64,AA-_", 400, "data_url_invalid"),
        ("image", "data:image/png;base64,A===", 400, "data_url_invalid"),
        ("image", "data:image/png;base64,AA==AAAA", 400, "data_url_invalid"),
        ("image", "data:image/png;base64,AAAA\n", 400, "data_url_invalid"),
        ("image", "data:image/png;base64,ÄÄÄÄ", 400, "data_url_invalid"),
        ("image", "data:image/png,AAAA", 400, "data_url_invalid"),
        ("image", "data:;base64,AAAA", 400, "data_url_invalid"),
        ("image", "data:" + "a" * 300 + "/b;base64,AAAA", 400, "data_url_invalid"),
        ("image", IMAGE.replace("image/png", "image/jpeg"), 200, None),
        ("image", IMAGE.replace("image/png", "image/*"), 200, None),
        ("image", IMAGE.replace("image/png", "image/heic"), 200, None),
        ("audio", SOUND.replace("audio/wav", "audio/mpeg"), 200, None),
        ("audio", SOUND.replace("audio/wav", "image/png"), 400, "data_url_invalid"),
        ("video", FILM.replace("video/mp4", "video/webm"), 200, None),
        ("video", FILM.replace("video/mp4", "image/png"), 400, "data_url_invalid"),
        ("image", IMAGE.replace("image/png", "audio/wav"), 400, "data_url_invalid"),
        ("image", IMAGE.replace("image/png", "application/octet-stream"), 200, None),
        ("image", IMAGE.replace("image/png", "IMAGE/PNG;charset=utf-8"), 200, None),
        ("image", "data:image/svg+xml;base64,PHN2Zz48L3N2Zz4=", 400, "media_unsupported"),
        ("image", SOUND, 400, "media_unsupported"),
        ("audio", IMAGE, 400, "media_unsupported"),
        ("video", SOUND, 400, "media_unsupported"),
        ("audio", FILM, 200, None),
        ("image", "http://10.0.0.1/a.png", 403, "media_url_not_allowed"),
        ("image", "/etc/passwd", 403, "media_url_not_allowed"),
        ("image", "iVBORw0KGgo=", 403, "media_url_not_allowed"),
        ("image", b"", 400, "media_invalid"),
        ("image", None, 400, "media_unknown"),
    ],
)
async def test_sources_have_their_answers(modality, source, status: int, reason: str | None) -> None:
    async with loader() as media:
        ref = MediaRef(modality, source, param="messages[0].content[2]")
        if reason is None:
            assert len(await media.load([ref])) == 1
            return
        error = await refusal(media, ref)
        assert (error.status, error.reason, error.param) == (status, reason, "messages[0].content[2]")
        assert len(error.message) < 300


async def test_sizes_are_computed_before_decoding() -> None:
    async with loader(image_max_bytes=1000, request_media_bytes=1500) as media:
        big = "data:image/png;base64," + "!" * 1340  # never decoded, else its alphabet would be refused
        assert (await refusal(media, MediaRef("image", big))).reason == "media_too_large"
        small = "data:image/png;base64," + "A" * 1200
        assert (await refusal(media, MediaRef("image", small), MediaRef("image", small))).reason == "media_too_large"


async def test_decoded_bytes_of_a_request_are_bounded() -> None:
    async with loader(request_decoded_bytes=20_000_000) as media:
        assert len(await media.load([MediaRef("image", IMAGE)] * 8)) == 8
        large = made.data_url(made.png(np.zeros((1500, 1500, 3), np.uint8)), "image/png")
        error = await refusal(media, MediaRef("image", large))
        assert (error.status, error.reason) == (400, "media_too_large")


async def test_one_bad_item_ends_the_others_and_is_named() -> None:
    async with loader() as media:
        refs = [MediaRef("image", IMAGE, param=f"content[{k}]") for k in range(6)]
        refs[4] = MediaRef("image", IMAGE[:-40], param="content[4]")
        error = await refusal(media, *refs)
        assert (error.status, error.reason, error.param) == (400, "media_invalid", "content[4]")
        assert len(await media.load(refs[:4])) == 4


async def test_hits_need_no_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    async with loader() as media:
        (first,) = await media.load([MediaRef("image", IMAGE)], scope=b"a")
        monkeypatch.setattr(jobs.ItemJob, "_decode", None)
        (second,) = await media.load([MediaRef("image", IMAGE)], scope=b"a")
        assert second is first
        with pytest.raises(TypeError):
            await media.load([MediaRef("image", IMAGE)], scope=b"b")


async def test_uuids_find_only_their_own_callers_uploads() -> None:
    async with loader() as media:
        (first,) = await media.load([MediaRef("image", IMAGE, uuid="cat")], scope=b"a")
        (again,) = await media.load([MediaRef("image", None, uuid="cat")], scope=b"a")
        assert again is first
        for scope, ref in (
            (b"b", MediaRef("image", None, uuid="cat")),
            (b"", MediaRef("image", None, uuid="cat")),
            (b"a", MediaRef("image", None, uuid="dog")),
            (b"a", MediaRef("video", None, uuid="cat")),
        ):
            error = await refusal(media, ref, scope=scope)
            assert (error.status, error.reason) == (400, "media_unknown")
        await media.load([MediaRef("image", IMAGE, uuid="shared")])
        error = await refusal(media, MediaRef("image", None, uuid="shared"))
        assert (error.reason, "cache_salt" in error.message) == ("media_unknown", True)


async def test_digests_differ_between_processes() -> None:
    async with loader() as one, loader() as two:
        (first,), (second,) = await one.load([MediaRef("image", IMAGE)]), await two.load([MediaRef("image", IMAGE)])
        assert first.parts[0].hash != second.parts[0].hash


async def test_too_many_requests_at_once_get_a_retry_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async with loader(max_media_waiting=2) as media:
        gate = asyncio.Event()
        real = jobs.ItemJob._load

        async def waiting(job):
            await gate.wait()
            return await real(job)

        monkeypatch.setattr(jobs.ItemJob, "_load", waiting)
        tasks = [asyncio.create_task(media.load([MediaRef("image", IMAGE)])) for _ in range(2)]
        await asyncio.sleep(0)
        error = await refusal(media, MediaRef("image", IMAGE))
        assert (error.status, error.reason) == (429, "media_busy")
        assert error.retry_after is not None
        gate.set()
        await asyncio.gather(*tasks)


class Stuck:
    """Work in the pool that goes on until `let_go` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started = threading.Event()
        self.let_go = threading.Event()
        real = jobs.ItemJob._finish

        def finish(job, opened, digest, alarm):
            self.started.set()
            self.let_go.wait(60)
            return real(job, opened, digest, alarm)

        monkeypatch.setattr(jobs.ItemJob, "_finish", finish)


@pytest.mark.parametrize("source", [IMAGE, JPEG])
async def test_overrunning_work_keeps_its_place_until_it_ends(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    stuck = Stuck(monkeypatch)
    async with loader(image_decode_timeout=0.1) as media:
        error = await refusal(media, MediaRef("image", source))
        assert (error.status, error.reason) == (400, "media_too_complex")
        ledger = media.ledger()
        assert ledger["media_stuck"] == media.stuck_for(0) == 1
        assert media.stuck_for(60) == 0
        assert ledger["media_reserved_bytes"] > 0
        stuck.let_go.set()


async def test_no_memory_in_time_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = Stuck(monkeypatch)
    async with loader(decoded_budget_bytes=3_000_000, image_decode_timeout=0.2) as media:
        first = asyncio.create_task(media.load([MediaRef("image", IMAGE)]))
        await asyncio.to_thread(stuck.started.wait, 5)
        other = made.data_url(made.png(made.noise(50, 50)), "image/png")
        error = await refusal(media, MediaRef("image", other))
        assert (error.status, error.reason) == (429, "media_busy")
        stuck.let_go.set()
        await asyncio.gather(first, return_exceptions=True)


@pytest.mark.parametrize("delay", [0.0, 0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03])
async def test_cancelling_at_any_moment_leaves_nothing(delay: float) -> None:
    async with loader() as media:
        refs = [MediaRef("video", FILM), MediaRef("image", IMAGE), MediaRef("audio", SOUND)]
        task = asyncio.create_task(media.load(refs, options=MediaOptions(use_audio_in_video=True)))
        await asyncio.sleep(delay)
        task.cancel()
        result = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(result[0], asyncio.CancelledError) or len(result[0]) == 3


async def test_freed_memory_is_returned_when_no_request_loads_media(monkeypatch: pytest.MonkeyPatch) -> None:
    trims = []
    monkeypatch.setattr(loading, "trim_heap", lambda: trims.append(threading.current_thread()))
    async with loader() as media:
        await media.load([MediaRef("image", IMAGE)])
        assert trims == []  # there is little memory to return
        media.trim_at = media.permits.budget.released + 60 * 80 * 3
        await asyncio.gather(*(media.load([MediaRef("image", IMAGE)], scope=bytes([number])) for number in range(8)))
        media._pool.shutdown()
        assert len(trims) == 1
        assert trims[0] is not threading.main_thread()


async def test_cancelled_work_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = Stuck(monkeypatch)
    async with loader() as media:
        task = asyncio.create_task(media.load([MediaRef("video", FILM)]))
        await asyncio.to_thread(stuck.started.wait, 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert media.ledger()["media_stuck"] == 1
        stuck.let_go.set()


async def test_nothing_holds_the_loop() -> None:
    noisy = made.data_url(made.png(made.noise(1000, 1000)), "image/png")
    async with loader() as media:
        await media.load([MediaRef("image", IMAGE)])
        loop = asyncio.get_running_loop()

        async def longest_turn() -> float:
            longest, running = 0.0, True

            async def pulse() -> None:
                nonlocal longest
                while running:
                    began = loop.time()
                    await asyncio.sleep(0)
                    longest = max(longest, loop.time() - began)

            beat = asyncio.create_task(pulse())
            await media.load([MediaRef("image", noisy), MediaRef("video", FILM), MediaRef("audio", SOUND)])
            running = False
            await beat
            return longest

        # 5 ms on an idle machine. Pool threads share cores and GIL with the loop, so the best of four tries counts.
        turns = [await longest_turn() for _ in range(4)]
        assert min(turns) < 0.1


async def test_messages_hold_no_paths_addresses_or_module_names() -> None:
    rng = np.random.default_rng(0)
    data = {
        "image": made.png(made.noise(30, 30)),
        "audio": made.sound(made.tone(0.3)),
        "video": made.film(made.ramp(6), 6),
    }
    async with loader() as media:
        for modality, good in data.items():
            for _ in range(15):
                broken = bytearray(good)
                for position in rng.integers(0, len(good), 12):
                    broken[position] = rng.integers(0, 256)
                result = await asyncio.gather(media.load([MediaRef(modality, bytes(broken))]), return_exceptions=True)
                if isinstance(result[0], BaseException):
                    assert isinstance(result[0], MediaError), result[0]
                    for word in ("0x", " object at ", 'File "', "/home", "site-packages", "PIL", "av.", "Errno"):
                        assert word not in result[0].message
