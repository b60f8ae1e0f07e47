"""Packages below a minimum version stop the start; minimums are pyproject.toml's; locks have hashes and no host."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from engine.base.errors import ConfigError
from server.start import floors

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCKS = sorted((ROOT / ".ci" / "locks").glob("*.txt"))


def pinned(path: Path) -> dict[str, str]:
    """Package name -> pinned version of a lock file."""
    lines = path.read_text().replace("\\\n", " ").splitlines()
    found = [re.match(r"([\w.-]+)==(\S+)", line) for line in lines]
    return {canonicalize_name(each[1]): each[2] for each in found if each}


def test_s45_the_floors_are_those_of_the_project():
    wanted = {canonicalize_name(each.name): each for each in map(Requirement, PROJECT["project"]["dependencies"])}
    for name, floor in floors.FLOORS.items():
        lowest = [part.version for part in wanted[name].specifier if part.operator == ">="]
        assert lowest == [floor], name
        assert floors.numbers(metadata.version(name)) >= floors.numbers(floor)


def test_s45_a_version_below_its_floor_is_refused_in_one_line(monkeypatch):
    installed = {"pillow": "12.9.1", "jinja2": "3.1.6", "orjson": "3.9"}
    monkeypatch.setattr(floors.metadata, "version", installed.__getitem__)
    with pytest.raises(ConfigError) as refused:
        floors.check({"pillow": "13.0.0", "jinja2": "3.1.6", "orjson": "3.11.6"})
    assert str(refused.value) == (
        "these packages have known faults: pillow 12.9.1 (needs 13.0.0), orjson 3.9 (needs 3.11.6); "
        "pip install 'pillow>=13.0.0' 'orjson>=3.11.6'"
    )


@pytest.mark.parametrize(("low", "high"), [("1.9", "1.10"), ("2", "2.0.1"), ("3.11.5", "3.11.6"), ("13.0.0rc1", "14")])
def test_versions_compare_by_their_numbers(low, high):
    assert floors.numbers(low) < floors.numbers(high)
    assert floors.numbers("15") == floors.numbers("15.0.0") == floors.numbers("15+cpu")


def test_s45_a_server_with_an_old_package_does_not_start(tmp_path):
    folder = tmp_path / "starlette-1.0.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: starlette\nVersion: 1.0.0\n")
    done = subprocess.run(
        [sys.executable, "-m", "server", "--port", "0"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert "omniloop: these packages have known faults: starlette 1.0.0 (needs 1.3.0)" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_s45_a_lock_has_hashes_and_names_no_host(path):
    text = path.read_text()
    assert "://" not in text
    for line in filter(None, text.replace("\\\n", " ").splitlines()):
        assert re.fullmatch(r"#.*|[\w.-]+==[^\s;]+( *;[^;]*?)?( +--hash=sha256:[0-9a-f]{64})+ *", line), line


def test_s45_the_images_lock_holds_what_the_project_needs():
    versions = pinned(ROOT / ".ci" / "locks" / "server.txt")
    wanted = PROJECT["project"]["dependencies"] + PROJECT["project"]["optional-dependencies"]["mistral"]
    wanted += PROJECT["build-system"]["requires"]
    for need in map(Requirement, wanted):
        if need.name != "torch":
            assert versions[canonicalize_name(need.name)] in need.specifier, need
