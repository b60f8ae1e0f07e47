"""What `pip wheel .` makes is whole: installed elsewhere, without the checkout, it serves.

The build starts from the extensions that the checkout has already compiled, so the test takes seconds; where they are
older than their sources they are compiled again.
"""

from __future__ import annotations

import ast
import asyncio
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.end_to_end.process import ROOT, serving
from tests.end_to_end.wire import ask, greedy, stream

ROOMS = ("server", "mm", "engine", "_fast")
CHECKED_IN = ("setup.py", "pyproject.toml", "README.md", "LICENSE", *ROOMS)
QUIET_PIP = ("--disable-pip-version-check", "--no-input", "-q")


def pip(*words: str, cwd: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", *words, *QUIET_PIP], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of the checkout."""
    copy = tmp_path_factory.mktemp("source")
    unwanted = shutil.ignore_patterns("__pycache__", "*.so")
    for name in CHECKED_IN:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, copy / name, ignore=unwanted)
        else:
            shutil.copy2(path, copy / name)
    if (ROOT / "build" / "_fast").is_dir():
        shutil.copytree(ROOT / "build" / "_fast", copy / "build" / "_fast")  # Cython's C
    built = copy / "build" / f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}" / "_fast"
    built.mkdir(parents=True)
    for compiled in (ROOT / "_fast").glob("*.so"):
        shutil.copy2(compiled, built)
    pip("wheel", "--no-deps", "--no-build-isolation", "-w", str(copy / "dist"), ".", cwd=copy)
    (made,) = (copy / "dist").glob("*.whl")
    return made


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    pip("install", "--no-deps", "--target", str(folder), str(wheel), cwd=folder)
    return folder


def test_the_wheel_holds_code_extensions_page_and_embedded_model(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert tops == set(ROOMS)
    copy = wheel.parent.parent
    sources = {
        str(path.relative_to(copy)) for room in ("server", "mm", "engine") for path in (copy / room).rglob("*.py")
    }
    missing = sources - set(names)
    assert not missing, "modules that were not packaged"
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    for pyx in (copy / "_fast").glob("*.pyx"):
        assert f"_fast/{pyx.stem}{suffix}" in names
    for folder in ("embedded", "playground", "docs"):
        for path in (copy / "server" / folder).iterdir():
            if path.is_dir():
                continue
            assert f"server/{folder}/{path.name}" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.endswith((".pyx", ".c", ".h"))]


def elsewhere(installed: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(installed)}


def test_help_runs_from_the_installed_copy(installed, tmp_path):
    code = "import server, sys; sys.stdout.write(server.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=elsewhere(installed), capture_output=True, text=True, check=True
    )
    assert Path(found.stdout).is_relative_to(installed)
    done = subprocess.run(
        [sys.executable, "-m", "server", "--help"],
        cwd=tmp_path,
        env=elsewhere(installed),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("usage: omniloop")
    assert "--max-model-len" in done.stdout


def test_it_serves_the_embedded_model_from_the_installed_copy(installed, tmp_path):
    with serving(cwd=tmp_path, env={"PYTHONPATH": str(installed)}) as process:
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        assert str(installed / "_fast") in maps
        assert str(ROOT / "_fast") not in maps
        whole = asyncio.run(ask(process.port, "POST", "/v1/completions", greedy("Count from 3 to 7.", 8)))
        assert whole.status == 200
        parts = asyncio.run(stream(process.port, "/v1/completions", greedy("Count from 3 to 7.", 8)))
        assert parts.done
        assert parts.token_ids == whole.json()["choices"][0]["token_ids"]
        assert parts.text == whole.json()["choices"][0]["text"]


def needed(tree: ast.Module) -> set[str]:
    """Top-level names that a module imports, except where it copes with their absence."""
    optional = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.Try) and any("ImportError" in ast.unparse(h.type or node) for h in node.handlers)
        for inner in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if node not in optional and isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif node not in optional and isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found - set(sys.stdlib_module_names) - set(ROOMS)


@pytest.mark.parametrize("room", [*ROOMS, "tests", "examples"])
def test_everything_that_is_imported_is_declared(room):
    """The wheel alone must be enough: `pip install` brings what the code imports; what tests need is named too."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    left_out = ("test", "lint") if room in ROOMS else ()
    extras = [entries for name, entries in project["optional-dependencies"].items() if name not in left_out]
    declared = [*project["dependencies"], *(entry for entries in extras for entry in entries)]
    brought = {re.split(r"[<>=;\[ ]", entry)[0] for entry in declared}
    brought |= {"tests", "examples", "setuptools", "cython"} if room not in ROOMS else set()
    named = {
        "PIL": "pillow",
        "yaml": "pyyaml",
        "opentelemetry": "opentelemetry-sdk",
        "multipart": "python-multipart",
        "Cython": "cython",
        "xdist": "pytest-xdist",
        "markdown_it": "markdown-it-py",
        "llama_index": "llama-index-embeddings-openai-like",  # one of the wheels that share the name
    }
    elsewhere = ROOT / "tests" / "end_to_end" / "clients"  # programs that run in environments of their own
    for path in (ROOT / room).rglob("*.py"):
        if path.is_relative_to(elsewhere):
            continue
        for name in needed(ast.parse(path.read_text())):
            assert named.get(name, name.replace("_", "-")) in brought, f"{path.relative_to(ROOT)} imports {name}"
