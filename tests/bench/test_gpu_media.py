"""gpu_media on a tiny Whisper and a small film: it prints all of its numbers."""

import json

import pytest

from tests.bench import gpu_media


@pytest.mark.full
def test_speech_and_a_film(tmp_path):
    flags = ["--shape", "tiny-whisper", "--device", "cpu", "--streams", "2", "--rounds", "1", "--seconds", "40"]
    flags += ["--tokens", "4", "--film-size", "320x240", "--film-seconds", "2", "--runs", "1", "--out", str(tmp_path)]
    assert gpu_media.main(flags) == 0
    written = json.loads((tmp_path / "gpu_media.json").read_text())
    assert written["speech"]["speech, times real time"] > 0
    assert written["speech"]["mm_prepare_seconds"] > 0
    assert written["film"]["film, s"] > 0
