"""README: its length, the order of its parts, its numbers, and its list of features that the server lacks."""

from __future__ import annotations

import json
import re
import subprocess
from typing import Any

import pytest

from engine.models.lookup import families
from server import docs
from server.dialects.table import routes_of
from server.flags.command_line import all_flags
from server.flags.config import Config
from server.flags.foreign_flags import FOREIGN
from tests.docs.blocks import ROOT, of_page, text_of

README = text_of("README")
PARTS = [
    "Install and serve", "Ask", "Cards and memory", "What it does not do", "Compared with other servers",
    "What it serves", "Next", "Licence, help, faults",
]  # fmt: skip
FIRST_SCREEN = 60  # lines
RESULTS = ROOT / "tests" / "bench" / "results"
STATES = ("Zamba2ForCausalLM", "OlmoHybridForCausalLM", "MiniMaxForCausalLM", "KimiLinearForCausalLM")


def part(name: str) -> str:
    """The text below the heading `name`."""
    return README.partition(f"\n## {name}\n")[2].partition("\n## ")[0]


def test_it_has_its_parts_in_order_and_is_short():
    assert re.findall(r"^## (.+)$", README, re.M) == PARTS
    assert len(README.split()) <= 1800


def test_command_and_answer_are_on_the_first_screen():
    sentence, picture = README.split("\n\n")[1:3]
    assert sentence.count(". ") == 0
    assert sentence.endswith(".")
    (shown,) = re.findall(r"^!\[.+\]\((\S+)\)$", picture)
    assert (ROOT / shown).is_file()
    first = README.splitlines()[:FIRST_SCREEN]
    order = [
        next(at for at, line in enumerate(first) if begins in line) for begins in ("docker ", "/pip ", "make serve")
    ]
    order += [next(at for at, line in enumerate(first) if begins in line) for begins in ("curl ", '"content": "42"')]
    assert order == sorted(order)


@pytest.mark.parametrize("page", ["README", *docs.NAMES])
def test_links_have_targets(page):
    folder = ROOT if page == "README" else docs.FOLDER
    for target in re.findall(r"\]\(([^)#]+)\)", text_of(page)):
        assert target.startswith("http") or (folder / target).is_file(), f"{page} links to {target}"


@pytest.mark.parametrize("word", ["serve", "test", "lint", "bench", "gpu"])
def test_the_make_words_are_targets(word):
    done = subprocess.run(["make", "-n", word], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"make {word}" in README


def test_make_serve_binds_to_loopback_and_takes_flags():
    words = ["make", "-n", "serve", "ARGS=--model /path"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "-m server --host 127.0.0.1 --port 8000 --model /path" in done.stdout
    done = subprocess.run([*words, "HOST=0.0.0.0"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "-m server --host 0.0.0.0 --port 8000" in done.stdout


def test_the_model_is_named_as_the_server_names_it():
    named = {name for page in ("README", *docs.NAMES) for name in re.findall(r'model="([^"]+)"', text_of(page))}
    assert named - {"embedder", "hosted_vllm/omniloop"} == set(Config().model_names)


# -- the comparison


def numbers(value: Any) -> set[str]:
    """Every number in a file of results, formatted as in README."""
    if isinstance(value, dict):
        return {each for inner in value.values() for each in numbers(inner)}
    if isinstance(value, list):
        return {each for inner in value for each in numbers(inner)}
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return set()
    return {f"{value:,}", f"{value:,.0f}" if value == int(value) else f"{value:,.2f}"}


def test_every_number_of_the_comparison_is_in_the_results():
    known = {each for path in RESULTS.glob("peer*.json") for each in numbers(json.loads(path.read_text()))}
    known |= set(re.findall(r"[\d.,]*\d", (RESULTS / "README.md").read_text()))
    section = part("Compared with other servers")
    rows = [
        line.split("|")[2:-1] for line in section.splitlines() if line.startswith("| ") and re.search(r"\| \d", line)
    ]
    rows = [cells for cells in rows if len(cells) < 5]  # the table of features has five columns
    found = [number for cells in rows for number in re.findall(r"[\d,]*\.?\d+", " ".join(cells))]
    assert len(rows) == 12
    assert len(found) > 60
    assert not set(found) - known


def test_servers_that_were_not_measured_are_named_so():
    section = part("Compared with other servers")
    assert "SGLang, llama.cpp and Ollama: not measured on this card." in section
    assert "SGLang and Ollama: not measured." in section


# -- what it does not do


def test_flags_that_are_refused_are_refused():
    named = re.findall(r"`--([a-z-]+)", part("What it does not do"))
    assert len(named) > 5
    for name in named:
        if name == "trust-remote-code":
            assert name in all_flags()
            continue
        if name == "tensor-parallel-size":  # some models are refused: tests/engine/parallel
            continue
        assert name not in all_flags(), f"--{name} is served now"
        assert "" not in FOREIGN[name].holds, f"--{name} is not refused"


def test_what_is_absent_is_absent():
    assert not set(STATES) & set(families())
    paths = {line.path for line in routes_of(Config())}
    assert not [path for path in paths if "speech" in path or "images" in path or "lora" in path]
    for family in ("Zamba2", "OLMo hybrid", "MiniMax lightning", "Kimi-Linear"):
        assert family in part("What it does not do")


def test_the_page_that_describes_measuring_names_the_files_of_the_comparison():
    assert {path.name for path in RESULTS.glob("peer*.json")} <= set(re.findall(r"`(\w+\.json)`", text_of("measuring")))


def test_the_first_command_of_docker_names_files_that_are_here():
    (code,) = [code for code in of_page("README", "console") if "docker" in code]
    assert code.splitlines()[0].endswith(" .")
    assert (ROOT / "Dockerfile").is_file()
