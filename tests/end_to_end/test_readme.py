"""What README.md tells a stranger to type works as it stands: every command and program of it runs here."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from server.flags.config import Config
from tests.end_to_end.process import ROOT, ServerProcess

README = (ROOT / "README.md").read_text(encoding="utf-8")
STATUS = "\nstatus=%{http_code}"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.M | re.S)


def answers() -> list[str]:
    """What README says each shell command answers, in order."""
    return re.findall(r"^```sh\n.*?^```\n\nIt answers `([^`]+)`$", README, re.M | re.S)


def text_of(events: list[str]) -> str:
    chunks = [json.loads(line.removeprefix("data: ")) for line in events]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


def test_there_is_a_command_for_text_picture_sound_and_film():
    kinds = ("image_url", "input_audio", "video_url")
    found = [next((kind for kind in kinds if kind in block), "text") for block in blocks("sh")]
    assert {"text", *kinds} <= set(found)
    assert len(blocks("python")) >= 1
    assert len(answers()) == len(blocks("sh"))


@pytest.mark.skipif(shutil.which("curl") is None, reason="README's commands are curl's")
@pytest.mark.parametrize(("command", "answer"), list(zip(blocks("sh"), answers())), ids=answers())
def test_the_shell_command_streams_the_answer_that_readme_shows(embedded_process: ServerProcess, command, answer):
    assert "localhost:8000" in command
    here = command.replace("localhost:8000", f"localhost:{embedded_process.port}")
    here = here.replace("curl ", f"curl -w '{STATUS}' ", 1)
    done = subprocess.run(["bash", "-c", here], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    body, _, status = done.stdout.rpartition("\nstatus=")
    assert status == "200", body
    events = [line for line in body.splitlines() if line]
    assert events.pop() == "data: [DONE]"
    assert len(events) >= 3
    assert text_of(events) == answer


def programs() -> list[tuple[str, list[str]]]:
    """Each Python program, and the lines that README says it prints."""
    parts = re.split(r"^```python\n.*?^```\n\n", README, flags=re.M | re.S)[1:]
    told = [
        re.findall(r"`([^`]+)`", part.partition("\n")[0]) if part.startswith("It prints ") else [] for part in parts
    ]
    return list(zip(blocks("python"), told, strict=True))


@pytest.mark.parametrize(("program", "lines"), programs())
def test_the_program_with_the_official_client_prints_an_answer(embedded_process: ServerProcess, program, lines):
    assert "localhost:8000" in program
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        names: dict[str, object] = {}
        exec(program.replace("localhost:8000", f"localhost:{embedded_process.port}"), names)
        names["client"].close()  # type: ignore[attr-defined]
    assert printed.getvalue()
    if lines:
        assert printed.getvalue().splitlines() == lines


def test_the_model_is_named_as_the_server_names_it():
    assert set(re.findall(r'model="([^"]+)"', README)) == set(Config().model_names)


@pytest.mark.parametrize("word", ["serve", "test", "lint", "bench", "gpu"])
def test_the_make_words_are_targets(word):
    done = subprocess.run(["make", "-n", word], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"make {word}" in README


def test_make_serve_starts_the_server_on_port_8000_with_the_words_given():
    done = subprocess.run(
        ["make", "-n", "serve", "ARGS=--model /path"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "-m server --port 8000 --model /path" in done.stdout


def test_files_and_folders_it_names_are_there():
    for path in re.findall(r"< (\S+\.\w+)", README):
        assert (ROOT / path).is_file(), path
        assert (ROOT / path).stat().st_size < 100_000, f"{path} is not a few KB"
    tree = README.partition("## The tree")[2]
    for folder in re.findall(r"^    (\w+)/", tree, re.M):
        assert (ROOT / folder).is_dir(), folder
    assert Path(ROOT / "CONTRIBUTING.md").is_file()


def test_endpoints_it_lists_are_served():
    from server.app import routes_of
    from server.flags.config import Config

    paths = {line.path for line in routes_of(Config())}
    spoken = README.partition("## What it speaks")[2].partition("##")[0]
    for path in re.findall(r"`(/[\w/]+)`", spoken):
        assert path in paths, path
