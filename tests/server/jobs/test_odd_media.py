"""Odd files over HTTP: an answer or the documented refusal, never a 500; media times are logged and counted."""

from __future__ import annotations

import logging

import pytest

from tests.mm import corpus, made

pytestmark = pytest.mark.asyncio(loop_scope="session")

SAMPLE = 6  # every sixth odd file; these cover all kinds and reasons
LENGTHS = ("longer than is heard", "longer than is seen")  # beyond limits of tests/mm/test_corpus.py
FIELDS = {"image": "image_url", "audio": "audio_url", "video": "video_url"}


def part(modality: str, data: bytes) -> dict:
    return {"type": FIELDS[modality], FIELDS[modality]: {"url": made.data_url(data)}}


async def asked(client, *parts: dict, **fields):
    content = [*parts, {"type": "text", "text": "?"}]
    return await client.chat(messages=[{"role": "user", "content": content}], max_tokens=1, **fields)


def counts(client) -> list[int]:
    """Numbers of observations of fetching, decoding, preparing and encoding."""
    told = client.state.metrics.histograms
    return [told[f"mm_{part}_seconds"].buckets()[-1][1] for part in ("fetch", "decode", "prepare", "encode")]


async def test_a_sample_is_answered_or_refused_by_its_reason(client):
    wrong = []
    for odd in [odd for odd in corpus.odd_files() if odd.name not in LENGTHS][::SAMPLE]:
        reply = await asked(client, part(odd.modality, odd.data))
        if odd.refused and reply.status == 400:
            fine = reply.error["reason"] in (*odd.refused, "data_url_invalid")  # the reason for an empty data: URL
        else:
            fine = reply.status == 200 and not odd.refused
        if not fine:
            wrong.append((odd.name, reply.status, reply.content[:200]))
    assert not wrong


async def test_frames_that_were_replaced_are_named_in_the_answer(serve):
    client = serve(chat={"trust_request_mm_kwargs": True})
    film = part("video", corpus.damaged(made.ramp(40), 25, 28, group=20))
    reading = {"video": {"frame_recovery": True, "num_frames": 8}}
    reply = await asked(client, part("image", made.png(made.noise(30, 30))), film, media_io_kwargs=reading)
    assert reply.status == 200, reply.content
    assert reply.json()["replaced_frames"] == [{"item": 1, "frames": [{"frame": 25, "shown": 28}]}]
    assert reply.reply_headers["x-replaced-frames"] == "1:25=28"
    whole = await asked(client, part("video", made.film(made.ramp(12))), media_io_kwargs=reading)
    assert "replaced_frames" not in whole.json()


async def test_the_background_of_a_request_changes_what_is_seen(serve, monkeypatch):
    client = serve(chat={"trust_request_mm_kwargs": True})
    clear = part("image", corpus.saved(corpus.flat("RGBA", (0, 0, 0, 0)), "PNG"))
    seen = []
    real = client.state.media.processor.process
    monkeypatch.setattr(
        type(client.state.media.processor),
        "process",
        lambda _, item, *rest: (seen.append(item.data[0, 0].tolist()), real(item, *rest))[1],
    )
    for colour in ([0, 0, 250], [0, 250, 0], [0, 0, 250]):  # the last colour comes from the cache
        reading = {"image": {"rgba_background_color": colour}}
        assert (await asked(client, clear, media_io_kwargs=reading)).status == 200
    assert seen == [[0, 0, 250], [0, 250, 0]]
    refused = await asked(client, clear, media_io_kwargs={"image": {"rgba_background_color": [0, 0, 300]}})
    assert (refused.status, refused.error["param"]) == (400, "media_io_kwargs")
    assert "three numbers of 0 to 255" in refused.error["message"]


async def test_what_media_took_is_in_the_log_and_the_metrics(client, caplog):
    image = part("image", made.png(made.noise(33, 44, seed=9)))
    before = counts(client)
    with caplog.at_level(logging.INFO, "omniloop"):
        for _ in range(2):
            assert (await asked(client, image)).status == 200
    fields = [record.fields for record in caplog.records if hasattr(record, "fields")]
    assert [(told["media"], told["media_cached"]) for told in fields] == [(1, 0), (1, 1)]
    assert fields[0]["media_decode_ms"] > 0
    assert fields[1]["media_decode_ms"] == 0
    assert "media_encode_ms" in fields[0]
    assert "media_encode_ms" not in fields[1], "the encoder cache held the picture"
    assert [now - then for now, then in zip(counts(client), before)] == [0, 1, 1, 1]


async def test_runs_of_towers_are_counted_and_what_they_made_is_found_again(client):
    image = part("image", made.png(made.noise(40, 50, seed=21)))
    before = client.state.engine.stats.encoder
    for _ in range(3):
        assert (await asked(client, image)).status == 200
    after = client.state.engine.stats.encoder
    assert [now - then for now, then in zip(after, before) if type(now) is int] == [1, 3, 2]
    assert after.seconds > before.seconds
