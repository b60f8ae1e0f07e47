"""A checkout that is not built, or would be built wrongly, is reported in one line."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def test_a_checkout_without_extensions_says_how_to_build_them(tmp_path):
    for name in ("server", "engine", "mm", "_fast"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.so", "__pycache__", "embedded"))
    ended = run(tmp_path, "-m", "server", "--port", "0")
    assert ended.returncode == 1
    assert ended.stderr.startswith("omniloop: the extension _fast.")
    assert "is not built; run `make build`" in ended.stderr
    assert ended.stderr.count("\n") == 1


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """setup.py with a fake Cython that compiles nothing and exits with status 77."""
    shutil.copy(ROOT / "setup.py", tmp_path)
    (tmp_path / "_fast").mkdir()
    shutil.copy(ROOT / "_fast" / "layout.py", tmp_path / "_fast")
    (tmp_path / "Cython").mkdir()
    (tmp_path / "Cython" / "__init__.py").write_text("__version__ = '3.2.0'\n")
    (tmp_path / "Cython" / "Build.py").write_text("def cythonize(*args, **named):\n    raise SystemExit(77)\n")
    return tmp_path


VERSIONS = [("3.3.0", True), ("3.3.0b1", True), ("3.0.12", True), ("3.3.1", False), ("3.1.0", False), ("4.0", False)]


@pytest.mark.parametrize(("version", "refused"), VERSIONS)
def test_setup_refuses_a_cython_that_miscounts_memory_views(sources, version, refused):
    (sources / "Cython" / "__init__.py").write_text(f"__version__ = {version!r}\n")
    ended = run(sources, "setup.py", "build_ext")
    assert ended.returncode == (1 if refused else 77), ended.stderr
    if refused:
        assert ended.stderr.startswith(f"Cython {version} ")
        assert "pip install" in ended.stderr
        assert ended.stderr.count("\n") == 1


OLD = "import runpy, setuptools, sys; setuptools.__version__ = '65.5.0'; sys.argv = ['setup.py', 'build_ext']; "
HEADERLESS = "import runpy, sys, sysconfig; sysconfig.get_path = lambda name: '/none'; sys.argv = ['setup.py']; "
BUILD = "runpy.run_path('setup.py', run_name='__main__')"


@pytest.mark.parametrize(
    ("words", "compiler", "text"),
    [
        (("setup.py", "build_ext"), "/none/cc -O2", "/none/cc: there is no such C compiler; run apt install gcc"),
        (("-c", HEADERLESS + BUILD), "cc", "/none/Python.h: there is no such file, and the compiler needs the headers"),
        (("-c", OLD + BUILD), "cc", "setuptools 65.5.0 cannot read the licence in pyproject.toml; run pip install"),
    ],
)
def test_setup_says_in_one_line_what_a_build_lacks(sources, monkeypatch, words, compiler, text):
    monkeypatch.setenv("CC", compiler)
    ended = run(sources, *words)
    assert ended.returncode == 1
    assert ended.stderr.startswith(text)
    assert ended.stderr.count("\n") == 1


def made(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs make in a folder with a Makefile and no environment."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    outer = {name: value for name, value in os.environ.items() if "MAKE" not in name and name != "MFLAGS"}
    environment = {**outer, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
    command = ["make", ".stamp-venv", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_make_refuses_an_old_python_by_its_version(tmp_path):
    old = tmp_path / "python"
    code = "import sys; sys.version_info = (3, 10, 13); exec(sys.argv[1])"
    old.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exec {sys.executable} -c "{code}" "$2"\n')
    old.chmod(0o755)
    ended = made(tmp_path, f"PYTHON={old}")
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"make: {old} is Python 3.10; set PYTHON= to Python 3.11 or newer\n")
    assert not (tmp_path / ".venv").exists()


def test_make_without_a_package_index_says_what_to_set(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    ended = made(tmp_path, f"PYTHON={sys.executable}", f"VENV={tmp_path}", "TORCH=no-such-torch==1")
    assert ended.returncode == 2
    assert "without a network, PIP_INDEX_URL= or PIP_FIND_LINKS= names a copy" in ended.stderr
    assert not (tmp_path / ".stamp-venv").exists()
