"""The source archive contains every file that a wheel needs, and a wheel can be built from the archive."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KINDS = {
    ".md",
    ".png",
    ".py",
    ".pyx",
    ".pxd",
    ".pyi",
    ".c",
    ".h",
    ".jinja",
    ".json",
    ".safetensors",
    ".typed",
    ".js",
    ".css",
    ".html",
}
QUIET = ("--disable-pip-version-check", "--no-input", "-q")


def run(*words: str, cwd: Path) -> str:
    done = subprocess.run([sys.executable, *words], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("archive")
    run("setup.py", "-q", "egg_info", "--egg-base", str(folder), "sdist", "--dist-dir", str(folder), cwd=ROOT)
    (made,) = folder.glob("*.tar.gz")
    return made


def test_the_source_archive_holds_what_a_build_reads(archive):
    with tarfile.open(archive) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    sources = {
        str(path.relative_to(ROOT))
        for room in ("server", "engine", "mm", "_fast")
        for path in (ROOT / room).rglob("*")
        if path.suffix in KINDS
    }
    assert not sources - names
    assert {"setup.py", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"} <= names
    assert not [name for name in names if name.startswith(("tests/", "examples/"))]
    assert not [name for name in names if name.endswith(".so") or name.startswith("build/")]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_wheel_of_the_source_archive_installs_and_runs(archive, tmp_path):
    wheels, installed = tmp_path / "wheels", tmp_path / "installed"
    alone = ("--no-deps", *QUIET)
    run("-m", "pip", "wheel", "--no-build-isolation", "-w", str(wheels), str(archive), *alone, cwd=tmp_path)
    (wheel,) = wheels.glob("*.whl")
    run("-m", "pip", "install", "--target", str(installed), str(wheel), *alone, cwd=tmp_path)
    code = f"""
import sys
sys.path.insert(0, {str(installed)!r})
import _fast.cpu
from server.__main__ import start
print(_fast.cpu.__file__)
sys.argv[1:] = ["check"]
start()
"""
    said = run("-c", code, cwd=tmp_path)
    assert said.startswith(str(installed))
    assert "served: natively" in said
