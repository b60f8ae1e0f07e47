"""Files below 1 MiB that need hundreds of MiB in a decoder: each gets an answer; the server's memory is measured.

The files are those of tests/mm/bombs.py. Before bounds existed, one request took this much memory (Linux): 597 bytes
took 1.4 GiB, and killed a process limited to 2 GiB; 1,056 bytes of WAV took 2 GiB, an MP3 of 1 MB 2.3 GiB.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import pytest

from mm.decode.magic import sniff
from tests.end_to_end.conftest import MODEL
from tests.end_to_end.hostile import GAP_S, MIB, Neighbour, ask, peak
from tests.mm import bombs, picture_bombs, sound_bombs

CHAT = "/v1/chat/completions"
MIMES = {"mp4": "mp4", "mov": "quicktime", "webm": "webm", "mkv": "x-matroska"}
MOST = 64 * MIB

FILMS: dict[str, Callable[[], bytes]] = {
    "samples": lambda: bombs.samples_of_a_byte(20_000_000),
    "edits": lambda: bombs.edits_of(2000, 20_000),
    "a compressed header": lambda: bombs.compressed_header(100 * MIB),
    "a run of a fragment": lambda: bombs.runs_of_fragments(1, 20_000_000),
    "an index": lambda: bombs.segment_index(60_000, 60),
    "samples in one place": lambda: bombs.shared_samples(2000, 700_000),
    "chapters in one place": lambda: bombs.shared_chapters(20_000, 60_000),
    "items": lambda: bombs.items(100_000_000),
    "deflated blocks": lambda: bombs.deflated_blocks(60, 8 * MIB),
    "bytes in front of frames": lambda: bombs.stripped_headers(1000, 700_000),
    "named tags": lambda: bombs.tagged_matroska(30_000),
}
SOUNDS: dict[str, Callable[[], bytes]] = {
    "samples": lambda: bombs.samples_of_a_byte(20_000_000, b"soun", brand=b"M4A "),
    "pictures of an MP3": lambda: sound_bombs.tagged_mp3(8, 64 * MIB),
    "pictures of a WAV": lambda: sound_bombs.tagged_wav(8, 64 * MIB),
    "a name of 2 GiB": lambda: sound_bombs.long_info(0x7F000000),
    "names": lambda: sound_bombs.tagged_riff(50_000),
    "small samples": lambda: bombs.real_samples_of_a_byte(700_000),
}
PICTURES: dict[str, Callable[[], bytes]] = {
    "texts": lambda: picture_bombs.texts(700),
}


def message(kind: str, data: bytes) -> dict[str, Any]:
    """A request with one file, labelled as clients label their files."""
    text = base64.b64encode(data).decode()
    if kind == "audio":
        part = {"type": "input_audio", "input_audio": {"data": text, "format": "wav"}}
    else:
        mime = f"{kind}/{MIMES.get(sniff(data) or '', 'png')}"
        part = {"type": f"{kind}_url", f"{kind}_url": {"url": f"data:{mime};base64,{text}"}}
    return {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": [part]}]}


CASES = [("video", name, make) for name, make in FILMS.items()]
CASES += [("audio", name, make) for name, make in SOUNDS.items()]
CASES += [("image", name, make) for name, make in PICTURES.items()]


@pytest.mark.parametrize(("kind", "name", "make"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_s23_a_small_file_takes_little_memory(server_process, kind, name, make):
    data = make()
    assert len(data) < MIB
    sent = message(kind, data)
    with peak(server_process.pid) as memory, Neighbour(server_process.port, server_process.pid) as neighbour:
        status, content = ask(server_process.port, "POST", CHAT, sent)
    print(f"{kind}: {name}: {len(data)} bytes, {status}, {memory.grown / MIB:.0f} MiB, gap {neighbour.slowest:.3f} s")
    assert status in (200, 400), content
    assert memory.grown < MOST
    assert neighbour.slowest < GAP_S
    assert server_process.alive


def test_s20_an_upload_is_bounded_as_well(server_process):
    data = SOUNDS["samples"]()
    head = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.m4a"\r\n\r\n'
    model = b'\r\n--x\r\nContent-Disposition: form-data; name="model"\r\n\r\n' + MODEL.encode()
    kind = "Content-Type: multipart/form-data; boundary=x\r\n"
    with peak(server_process.pid) as memory:
        body = head + data + model + b"\r\n--x--\r\n"
        status, content = ask(server_process.port, "POST", "/v1/audio/transcriptions", body, kind)
    print(f"{memory.grown / MIB:.0f} MiB, {status}")
    assert status == 400, content
    assert memory.grown < MOST
