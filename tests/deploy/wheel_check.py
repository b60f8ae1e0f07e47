"""`make wheel-check PYTHON=...`: checks that the wheel for one Python installs, starts and answers.

Owner: the main thread; runs in the Python under test, with the standard library only. Builds the wheel in isolation
(pip installs the build tools), installs the wheel with its dependencies into a new environment, starts the installed
command in a folder without a checkout, asks one question and compares the answer. Needs a package index and a compiler.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "_fast", "engine", "mm", "server")
QUESTION = {"messages": [{"role": "user", "content": "What is 12 + 30?"}], "temperature": 0}
ANSWER = "42"


def run(*words: str, cwd: Path) -> None:
    print("$", *words, flush=True)
    subprocess.run(words, cwd=cwd, check=True)


def built(folder: Path) -> Path:
    """Builds the wheel from a copy without compiled files, so that everything is compiled for this Python."""
    copy = folder / "source"
    copy.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy2(ROOT / name, copy / name)
    venv.create(folder / "builder", with_pip=True)  # a distribution's Python may have no pip
    python = str(folder / "builder" / "bin" / "python")
    run(python, "-m", "pip", "wheel", "--no-deps", "-w", str(folder / "dist"), ".", cwd=copy)
    (made,) = (folder / "dist").glob("*.whl")
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    assert f"-{tag}-{tag}-" in made.name, f"{made.name} is for another Python than {tag}"
    with zipfile.ZipFile(made) as archive:
        assert "server/docs/models.md" in archive.namelist()
    return made


def installed(wheel: Path, torch: str, folder: Path) -> Path:
    """Installs the wheel and its dependencies into a new environment; returns the environment's folder of commands."""
    venv.create(folder / "environment", with_pip=True)
    commands = folder / "environment" / "bin"
    wanted = [torch] if torch else []
    run(str(commands / "python"), "-m", "pip", "install", "-q", *wanted, str(wheel), cwd=folder)
    return commands


def answer(commands: Path, folder: Path) -> str:
    """The answer of the installed server, which is started in an empty folder."""
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    run(str(commands / "omniloop"), "--version", cwd=elsewhere)
    run(str(commands / "omniloop"), "check", cwd=elsewhere)
    words = [str(commands / "omniloop"), "--host", "127.0.0.1", "--port", "0"]
    process = subprocess.Popen(words, cwd=elsewhere, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = next(line.split()[2] for line in process.stdout if line.startswith("Listening on"))
        request = urllib.request.Request(
            f"{address.rstrip('/')}/v1/chat/completions",
            json.dumps(QUESTION).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.load(reply)["choices"][0]["message"]["content"]
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", default="", help="the torch to install first, such as torch==2.13.0")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        commands = installed(built(folder), options.torch, folder)
        found = answer(commands, folder)
    assert found == ANSWER, f"{QUESTION['messages'][0]['content']} was answered by {found!r}"
    print(f"wheel-check: Python {sys.version.split()[0]} answers {found}")


if __name__ == "__main__":
    main()
