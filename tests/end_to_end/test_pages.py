"""What the pages of examples/ tell is true: their flags and metrics are there, their programs run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from server.flags.command_line import all_flags
from server.flags.foreign_flags import FOREIGN
from tests.end_to_end.process import ROOT, ServerProcess

PAGES = sorted(page for page in (ROOT / "examples").rglob("*.md") if page.parent.name != "embedded_model")
SWITCHES = {f"--no-{name}" for name, flag in all_flags().items() if flag.kind is bool}
FLAGS = {f"--{name}" for name in all_flags()} | SWITCHES | {"--config", "--help"}
# Of docker, kubectl, routers and other programs that the pages call.
OTHERS = {
    *("--from-file", "--from-literal", "--local-dir", "--gpus", "--add-host", "--group-add", "--head"),
    *("--address", "--policy", "--worker-urls", "--config.file", "--platform", "--json"),
}


def ours(page: Path) -> str:
    """The page without the first column of a table of vLLM's flags."""
    return re.sub(r"^\| [^|]*\|", "|", page.read_text(encoding="utf-8"), flags=re.M)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT / "examples")))
def test_flags_that_a_page_names_are_there(page):
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z.-]+[a-z]", ours(page))) - OTHERS
    flags = {name.partition(".")[0] for name in named}  # --flag.key is one key of a JSON flag
    assert flags <= FLAGS | {f"--{name}" for name, entry in FOREIGN.items() if entry.holds}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT / "examples")))
def test_files_that_a_page_names_are_there(page):
    for path in re.findall(r"`((?:examples|server|tests)/[\w./-]+)`", page.read_text(encoding="utf-8")):
        assert (ROOT / path).exists(), path


def programs() -> list[tuple[str, str]]:
    """(page, program) of each block of Python."""
    found = []
    for page in PAGES:
        found += [(page.stem, code) for code in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)]
    return found


def exports(text: str) -> dict[str, str]:
    return dict(re.findall(r"^    export (\w+)=(\S+)$", text, re.M))


@pytest.mark.parametrize(("page", "program"), programs(), ids=lambda value: value.split()[1] if " " in value else value)
def test_a_program_prints_the_answer(embedded_process: ServerProcess, page, program):
    """With the variables that the page exports."""
    here = f"localhost:{embedded_process.port}"
    told = exports((ROOT / "examples" / f"{page}.md").read_text().replace("localhost:8000", here))
    done = subprocess.run(
        [sys.executable, "-c", program.replace("localhost:8000", here)],
        env={**os.environ, **told}, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "42"
