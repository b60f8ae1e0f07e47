"""A checkout that is not built, or would be built wrongly, says so in one line."""

from __future__ import annotations

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


VERSIONS = [("3.3.0", True), ("3.3.0b1", True), ("3.0.12", True), ("3.3.1", False), ("3.1.0", False), ("4.0", False)]


@pytest.mark.parametrize(("version", "refused"), VERSIONS)
def test_setup_refuses_a_cython_that_miscounts_memory_views(tmp_path, version, refused):
    shutil.copy(ROOT / "setup.py", tmp_path)
    (tmp_path / "_fast").mkdir()
    shutil.copy(ROOT / "_fast" / "layout.py", tmp_path / "_fast")
    (tmp_path / "Cython").mkdir()
    (tmp_path / "Cython" / "__init__.py").write_text(f"__version__ = {version!r}\n")
    (tmp_path / "Cython" / "Build.py").write_text("def cythonize(*args, **named):\n    raise SystemExit(77)\n")
    ended = run(tmp_path, "setup.py", "build_ext")
    assert ended.returncode == (1 if refused else 77), ended.stderr
    if refused:
        assert ended.stderr.startswith(f"Cython {version} ")
        assert "pip install" in ended.stderr
        assert ended.stderr.count("\n") == 1
