"""Each example of a client prints the embedded model's answer; a missing input file is reported in a line."""

from __future__ import annotations

import asyncio
import io

import pytest

from examples import chat, listen, transcribe, video, vision
from tests.server.live import listening

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.parametrize(
    ("example", "words", "printed"),
    [
        (chat, ["What is 12 + 30?"], "> What is 12 + 30?\n42\n"),
        (listen, [], "The digits 118.\n"),
        (transcribe, [], "118\n"),
        (transcribe, ["--format", "srt", "--language", "en"], "118\n\n"),
        (video, [], "A blue square moves to the right.\n"),
        (vision, [], "A red circle.\n"),
    ],
)
async def test_an_example_prints_the_answer(client, monkeypatch, capsys, example, words, printed):
    async with listening(client) as url:
        monkeypatch.setattr("sys.argv", ["example.py", *words, "--base-url", f"{url}/v1"])
        await asyncio.to_thread(example.main)
    assert capsys.readouterr().out.rstrip("\n").endswith(printed.rstrip("\n"))


async def test_the_end_of_the_input_ends_the_chat(client, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("Count from 3 to 5.\n"))
    async with listening(client) as url:
        monkeypatch.setattr("sys.argv", ["chat.py", "--base-url", f"{url}/v1"])
        await asyncio.to_thread(chat.main)
    assert "3, 4, 5" in capsys.readouterr().out


@pytest.mark.parametrize("example", [listen, transcribe, video, vision])
async def test_a_missing_file_is_reported_in_a_line(monkeypatch, capsys, example):
    monkeypatch.setattr("sys.argv", ["example.py", "none.bin"])
    with pytest.raises(SystemExit):
        example.main()
    assert capsys.readouterr().err.endswith("error: there is no file none.bin\n")
