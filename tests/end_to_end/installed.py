"""Clients that cannot be installed in our environment, each in a folder of its own under build/clients/.

litellm needs older versions of openai and huggingface-hub than the tests do; guidellm installs half of PyData. Each
Python client gets a virtual environment on top of ours. Compatible packages of our environment are reused, and only the
rest is installed (8 s and 100 MB instead of 25 s and 600 MB). npm installs the Vercel AI SDK. A folder is made once and
reused until its requirements change. Without access to a package index the tests are skipped; any other error of an
installation is a failure.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from abc import ABC, abstractmethod
from pathlib import Path

import pytest

from tests.end_to_end.process import ROOT

CLIENTS = ROOT / "build" / "clients"
INSTALL_S = 170
# Messages of pip and npm when no package index is reachable.
UNREACHABLE = ("connection broken by", "ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ETIMEDOUT", "ENETUNREACH")


class Installing(ABC):
    """An installation in a separate process; `done` waits for the process and returns the folder."""

    def __init__(self, name: str, *requirements: str) -> None:
        self.requirements = requirements
        mark = hashlib.sha256(json.dumps([sys.version, *requirements]).encode()).hexdigest()[:12]
        self.folder = CLIENTS / f"{name}-{mark}"
        self.stamp = self.folder / "complete"
        self._process: subprocess.Popen[str] | None = None
        if not self.stamp.exists():
            for old in CLIENTS.glob(f"{name}-*"):
                shutil.rmtree(old)
            self.folder.mkdir(parents=True)
            self._process = subprocess.Popen(
                self.command(), cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )

    @abstractmethod
    def command(self) -> list[str]:
        """The command that installs the requirements into the folder."""

    def done(self) -> Path:
        if self._process is not None and not self.stamp.exists():
            printed = self._process.communicate(timeout=INSTALL_S)[0]
            if self._process.returncode:
                if any(word in printed for word in UNREACHABLE):
                    pytest.skip(f"no package index can be reached to install {' '.join(self.requirements)}")
                pytest.fail(f"{' '.join(self.requirements)} cannot be installed:\n{printed[-2000:]}")
            self.stamp.touch()
        return self.folder

    def close(self) -> None:
        """Kills an installation that is still running; the next session starts it again from an empty folder."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()


class PythonClient(Installing):
    """A virtual environment that also imports our packages, after its own."""

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    def command(self) -> list[str]:
        venv.create(self.folder, with_pip=False, symlinks=True)
        own = Path(sysconfig.get_path("purelib", vars={"base": str(self.folder), "platbase": str(self.folder)}))
        ours = {sysconfig.get_path("purelib"): None, sysconfig.get_path("platlib"): None}
        (own / "outer.pth").write_text("".join(f"{path}\n" for path in ours))
        quiet = ("-q", "--disable-pip-version-check", "--no-input", "--no-compile", "--retries", "1")
        return [self.python, "-m", "pip", "install", *quiet, *self.requirements]


class NodeClient(Installing):
    """A folder with node_modules; needs node and npm."""

    def command(self) -> list[str]:
        (self.folder / "package.json").write_text('{"private": true}\n')
        quiet = ("--loglevel=error", "--no-audit", "--no-fund", "--fetch-retries=0")
        return ["npm", "install", *quiet, *self.requirements]


def run(command: list[str], cwd: Path, **environment: str) -> str:
    """Runs a program that must end with status 0; returns its output."""
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, f"status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout
