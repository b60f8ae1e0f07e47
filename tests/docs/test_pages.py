"""The pages for users: listed, served, printed; the commands and flags in them are real."""

from __future__ import annotations

import re
import shlex

import pytest

from server import cli, docs
from server.bench.command import COMMANDS as BENCHES
from server.bench.command import parse as parse_bench
from server.bench.foreign_flags import FOREIGN as BENCH_FOREIGN
from server.cli import build, parse
from server.dialects.table import operations, routes_of
from server.flags.command_line import all_flags, flags_of
from server.flags.config import Config
from server.flags.foreign_flags import FOREIGN
from server.flags.help import COMMANDS
from server.routes import adapters
from server.start.run_batch import parse as parse_run_batch
from tests.docs.blocks import ROOT, blocks, text_of

PAGES = ("README", *docs.NAMES)
# Flags of other programs in the pages.
OTHERS = {
    *("gpus", "device", "group-add", "rm", "build-arg", "add-host", "now", "from-file", "policy", "worker-urls"),
    *("config", "factory", "head", "port", "address", "index-url", "upgrade", "config.file", "lora-modules", "help"),
    *("request-timeout", "version", "format", "device-target", "oss"),
}


def test_the_list_holds_every_page():
    assert {path.stem for path in docs.FOLDER.glob("*.md")} == {*docs.NAMES}
    assert all((docs.FOLDER / name).is_file() for name in docs.PICTURES)
    assert all(text_of(name).startswith("# ") for name in docs.NAMES)


def test_a_command_lists_and_prints_the_pages(capsys):
    assert cli.main(["docs"]) == 0
    listed = capsys.readouterr().out
    assert all(f"  {name} " in listed for name in docs.NAMES)
    assert cli.main(["docs", "models"]) == 0
    assert capsys.readouterr().out == docs.text("models") + "\n"
    assert cli.main(["docs", "--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: omniloop docs [NAME]")


@pytest.mark.parametrize("name", ["model", "../flags", "models.md", ""])
def test_an_unknown_page_is_refused(name, capsys):
    assert cli.main(["docs", name]) == 2
    said = capsys.readouterr().err
    assert "there is no such page; use one of models, hardware, flags" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("page", PAGES)
def test_flags_that_a_page_names_exist(page):
    benches = {name for command in BENCHES.values() for name in flags_of(command.flags, "bench")}
    flags = {*all_flags(), *(f"no-{name}" for name in all_flags())}
    known = flags | benches | {*FOREIGN} | {*BENCH_FOREIGN} | OTHERS
    named = set(re.findall(r"(?<![\w-])--([a-z][a-z0-9-]+)", text_of(page)))
    assert not named - known


def commands() -> list[tuple[str, str]]:
    """Page and words of every line of a block that starts this program."""
    found = []
    for block in blocks():
        for line in block.code.splitlines():
            words = line.partition(" ")[2] if line.startswith("CUDA_VISIBLE_DEVICES") else line
            words = f" {words}".removeprefix(" .omniloop/bin/").lstrip()
            if block.language in ("console", "sh") and words.startswith("omniloop "):
                found.append((str(block), words.removeprefix("omniloop ")))
    return found


@pytest.mark.parametrize(("block", "words"), commands())
def test_commands_of_the_pages_are_read_by_the_command_line(block, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = shlex.split(words)
    if argv[0] == "bench":
        parse_bench(argv[1:], print, build)
    elif argv[0] == "run-batch":
        assert parse_run_batch(argv[1:], build) is not None
    elif argv[0].startswith("--help"):
        with pytest.raises(SystemExit) as ended:
            parse(argv)
        assert ended.value.code == 0
    else:
        assert parse(argv)[0] in COMMANDS


@pytest.mark.parametrize("page", PAGES)
def test_routes_that_a_page_names_are_served(page):
    served = {line.path.replace(":path", "") for line in routes_of(Config())} | {"/v1/realtime", "/docs/api"}
    of_operators = {"/start_profile", "/stop_profile", *(line.path for line in adapters.ROUTES)}
    prefixes = ("/v1/", "/health", "/docs", "/metrics", "/pooling", "/score", "/rerank", "/tokenize", "/inference")
    for path in re.findall(r"`(/[\w/{}]+)`", text_of(page)):
        if path.startswith(prefixes):
            assert path in served | of_operators | {f"/docs/{name}" for name in ("NAME",)}, path
    assert ("GET", "/docs/{name}") in operations()


def test_release_notes_are_short_and_in_groups():
    notes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    for version in notes.split("\n## ")[1:]:
        groups = re.findall(r"^### (.+)$", version, re.M)
        assert groups, "no group"
        assert groups == [name for name in ("Added", "Changed", "Fixed", "Removed") if name in groups]
        assert len(version.split()) <= 1200


def test_the_lines_for_claude_code_name_a_model_of_each_size():
    """The program asks for a small model by another name in the background; without the variable it gets 404."""
    page = text_of("clients")
    names = [f"ANTHROPIC_DEFAULT_{size}_MODEL=coder" for size in ("HAIKU", "SONNET", "OPUS")]
    assert not [name for name in names if name not in page]
    assert "--served-model-name coder claude-haiku-" in page
    assert "ANTHROPIC_DEFAULT_HAIKU_MODEL" in text_of("README")
