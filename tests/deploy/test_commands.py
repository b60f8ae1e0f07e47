"""The commands of the Dockerfile and of cibuildwheel run unchanged, in an environment of their own.

Only the folders differ. Installed packages and build tools are reused, and the build starts from the extensions that
the checkout has compiled. The long tests are skipped if no package index is reachable.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tomllib
import urllib.request
from pathlib import Path

import pytest

from tests.deploy.test_deploy import ROOT, instructions
from tests.end_to_end.installed import UNREACHABLE, PythonClient

# The first two commands need root and change the system. The lock file is for the image's Python, and the packages come
# from this environment.
OF_AN_IMAGE = ("apt-get ", "useradd ", "pip install --no-deps --require-hashes")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def shell(command: str, environment: dict[str, str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["sh", "-c", command], cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def run(command: str, environment: dict[str, str], cwd: Path) -> str:
    done = shell(command, environment, cwd)
    if any(word in done.stdout + done.stderr for word in UNREACHABLE):
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


class Image:
    """The image that the Dockerfile builds, below a folder: the folder contains opt/omniloop and src."""

    def __init__(self, folder: Path, dockerfile: Path) -> None:
        self.folder = folder
        self.environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        # With "0" pip builds with the installed tools: newer tools would compile everything again.
        self.environment |= {"PIP_NO_INPUT": "1", "OMP_NUM_THREADS": "1", "PIP_NO_BUILD_ISOLATION": "0"}
        self.command: dict[str, str] = {}
        stage = 0
        for word, rest in instructions(dockerfile):
            if word == "FROM":
                stage += 1
            elif word == "ARG":
                name, _, value = rest.partition("=")
                self.environment.setdefault(name, value)
            elif word == "ENV":
                self.set(rest)
            elif word == "RUN" and not rest.startswith(OF_AN_IMAGE):
                run(self.here(rest), self.environment, folder)
                self.share()
            elif word == "COPY" and stage == 1:
                self.copy(*rest.split())
            elif word in ("ENTRYPOINT", "HEALTHCHECK"):
                self.command[word] = rest[rest.index("[") :]

    def here(self, text: str) -> str:
        return text.replace("/opt/omniloop", f"{self.folder}/opt").replace("/src", f"{self.folder}/src")

    def set(self, rest: str) -> None:
        for pair in self.here(rest).split():
            name, _, value = pair.partition("=")
            self.environment[name] = value.replace("$PATH", self.environment["PATH"]).replace(
                "/cache", f"{self.folder}/cache"
            )

    def copy(self, *paths: str) -> None:
        *sources, target = paths
        for source in sources:
            to = Path(self.here(target))
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, to, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
            else:
                to.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / source, to)
        built = (
            Path(self.here("/src/build")) / f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}" / "_fast"
        )
        if "_fast" in sources and (ROOT / "build" / "_fast").is_dir():
            shutil.copytree(ROOT / "build" / "_fast", self.folder / "src" / "build" / "_fast")
            built.mkdir(parents=True)
            for compiled in (ROOT / "_fast").glob("*.so"):
                shutil.copy2(compiled, built)

    def share(self) -> None:
        """Makes the packages of this environment importable in the image, after the image's own packages."""
        (packages,) = (self.folder / "opt" / "lib").glob("python*/site-packages")
        paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        (packages / "outer.pth").write_text("".join(f"{path}\n" for path in paths))


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_image_is_built_says_that_it_is_healthy_and_answers(tmp_path):
    image = Image(tmp_path, ROOT / "Dockerfile")
    installed = run("python -c 'import server; print(server.__file__)'", image.environment, tmp_path)
    assert Path(installed).is_relative_to(tmp_path / "opt")
    test = PROJECT["tool"]["cibuildwheel"]["test-command"]
    assert "served: natively" in run(test, image.environment, tmp_path)
    command = [*json.loads(image.command["ENTRYPOINT"]), "--port", "0", "--host", "127.0.0.1", "--num-threads", "1"]
    with subprocess.Popen(command, cwd=tmp_path, env=image.environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            listening = next(line for line in process.stdout if line.startswith("Listening on "))
            port = listening.strip().rpartition(":")[2]
            probe = json.loads(image.command["HEALTHCHECK"])
            for where, healthy in ((port, True), ("1", False)):
                words = [word.replace(":8000", f":{where}") for word in probe]
                done = subprocess.run(words, env=image.environment, capture_output=True, check=False)
                assert (done.returncode == 0) is healthy, done.stderr
            body = {"messages": [{"role": "user", "content": "What is 12 + 30?"}], "temperature": 0}
            asked = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/chat/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(asked, timeout=60) as answer:
                assert json.load(answer)["choices"][0]["message"]["content"] == "42"
        finally:
            process.send_signal(signal.SIGTERM)
    assert process.returncode == 0


def test_the_image_for_amd_asks_for_an_index(tmp_path):
    (guard,) = (rest for word, rest in instructions(ROOT / "Dockerfile.rocm") if rest.startswith("test -n"))
    refused = shell(guard, {"TORCH_INDEX": ""}, tmp_path)
    assert (refused.returncode, "set the package index" in refused.stdout) == (1, True)
    assert shell(guard, {"TORCH_INDEX": "https://index"}, tmp_path).returncode == 0


@pytest.mark.full
@pytest.mark.timeout(300)
def test_cibuildwheel_reads_its_configuration(tmp_path):
    client = PythonClient("cibuildwheel", "cibuildwheel>=3.2")
    folder = client.done()
    command = f"{folder}/bin/cibuildwheel --print-build-identifiers --platform linux --archs"
    shutil.copy2(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "setup.py").touch()
    for arch in PROJECT["tool"]["cibuildwheel"]["archs"]:
        named = run(f"{command} {arch} .", dict(os.environ), tmp_path).split()
        assert named == [f"cp3{minor}-manylinux_{arch}" for minor in (11, 12, 13, 14)]
