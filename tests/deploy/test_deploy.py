"""examples/deploy and the Dockerfiles: the server has their flags, serves their probes, and their fields exist."""

from __future__ import annotations

import ast
import importlib
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from server import docs
from server.cli import build, parse
from server.dialects.table import routes_of
from server.flags.arguments import from_mapping
from server.flags.command_line import all_flags
from server.flags.config import Config
from tests.deploy.schemas import COMPOSE, schema_of

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "examples" / "deploy"
DOCKERFILES = sorted(ROOT.glob("Dockerfile*"))
PATHS = {line.path for line in routes_of(Config())}


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text(encoding="utf-8")))


KUBERNETES = [
    each for path in sorted((DEPLOY / "kubernetes").glob("*.yaml")) for each in documents(f"kubernetes/{path.name}")
]


def config_of(flags: dict[str, Any]) -> Config:
    return build(from_mapping(flags, all_flags(), ""))


# -- Kubernetes


@pytest.mark.parametrize("described", KUBERNETES, ids=lambda described: described["kind"])
def test_a_manifest_fits_its_schema(described):
    jsonschema.validate(described, schema_of(described))


@pytest.mark.parametrize(
    "path", [("spec", "replica"), ("metadata", "label"), ("spec", "template", "spec", "container")]
)
def test_a_misspelt_field_is_found(path):
    wrong = documents("kubernetes/server.yaml")[0]
    inner = wrong
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = 1
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, schema_of(wrong))


def test_the_deployment_starts_our_server_and_leaves_it_time_to_drain():
    pod = documents("kubernetes/server.yaml")[0]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    command, config = parse(container["args"])
    assert command == "serve"
    server = config.server
    assert pod["terminationGracePeriodSeconds"] >= server.shutdown_delay + server.shutdown_timeout + 15
    assert container["ports"][0]["containerPort"] == server.port
    mounted = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert server.api_key_file.rpartition("/")[0] in mounted
    assert set(mounted.values()) == {volume["name"] for volume in pod["volumes"]}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] in PATHS
        assert container[probe]["httpGet"]["port"] == "http"
    assert container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"] >= (
        server.startup_timeout
    )


def test_everything_selects_the_same_pods():
    kinds = {each["kind"]: each["spec"] for each in KUBERNETES}
    labels = kinds["Deployment"]["template"]["metadata"]["labels"]
    assert kinds["Service"]["selector"] == labels
    for kind in ("Deployment", "PodDisruptionBudget", "PodMonitor", "InferencePool"):
        assert kinds[kind]["selector"]["matchLabels"] == labels, kind
    names = {each["kind"]: each["metadata"]["name"] for each in KUBERNETES}
    (backend,) = kinds["HTTPRoute"]["rules"][0]["backendRefs"]
    assert backend["name"] == names["InferencePool"]
    assert kinds["PodMonitor"]["podMetricsEndpoints"][0]["path"] in PATHS
    claim = kinds["Deployment"]["template"]["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"]
    assert claim == names["PersistentVolumeClaim"]


# -- containers


def instructions(path: Path) -> list[tuple[str, str]]:
    """(instruction, rest) of each line; continuation lines are joined and comments dropped."""
    text = re.sub(r"^#.*\n", "", path.read_text(encoding="utf-8"), flags=re.M).replace("\\\n", " ")
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in text.splitlines() if line)]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_is_small_unprivileged_and_says_how_it_is(path):
    lines = instructions(path)
    last = max(at for at, (word, _) in enumerate(lines) if word == "FROM")
    assert all(":" in rest and "latest" not in rest for word, rest in lines if word == "FROM"), "a tag, and no latest"
    for word, rest in lines:
        if word == "RUN" and "apt-get install" in rest:
            assert "--no-install-recommends" in rest
            assert rest.endswith("rm -rf /var/lib/apt/lists/*")
        assert word not in ("ADD", "MAINTAINER")
        assert "sudo" not in rest
        assert not re.search(r"(?i)(token|secret|password|api_key)=", rest)
    final = dict(lines[last:])
    assert final["USER"] not in ("0", "root")
    assert final["EXPOSE"] == str(Config().server.port)
    assert final["ENTRYPOINT"] == '["omniloop"]'
    assert final["VOLUME"] == "/cache"
    assert "HF_HOME=/cache" in final["ENV"]
    assert "TRITON_CACHE_DIR=/cache" in final["ENV"]
    assert "NUMBA_CACHE_DIR=/cache" in final["ENV"]
    (probed,) = re.findall(r"http://127\.0\.0\.1:8000(/[\w/]+)", final["HEALTHCHECK"])
    assert probed in PATHS


def test_only_what_is_copied_goes_to_the_daemon():
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    copied = {
        source
        for path in DOCKERFILES
        for word, rest in instructions(path)
        if word == "COPY" and "--from" not in rest
        for source in rest.split()[:-1]
    }
    assert lines[0] == "*"
    assert {line[1:] for line in lines if line.startswith("!")} == copied


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_is_built_from_what_is_here(path):
    copied = [rest.split()[:-1] for word, rest in instructions(path) if word == "COPY" and "--from" not in rest]
    sources = {source for words in copied for source in words}
    assert all((ROOT / source).exists() for source in sources)
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {package.rstrip("*") for package in packages} <= sources


def test_accelerators_differ_in_torch_compiler_and_variables_only():
    plain, *others = (set(instructions(path)) for path in DOCKERFILES)
    for other in others:
        unlike = plain ^ other
        assert {word for word, _ in unlike} <= {"ARG", "ENV", "RUN"}
        assert all("TORCH_INDEX" in rest for word, rest in unlike if word == "RUN")


def test_the_command_of_the_package_is_there():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["scripts"]["omniloop"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_compose_starts_our_server():
    (content,) = documents("compose/compose.yaml")
    jsonschema.validate(content, COMPOSE)
    service = content["services"]["omniloop"]
    config = parse(service["command"])[1]
    assert (DEPLOY / "compose" / service["build"]["context"]).resolve() == ROOT
    assert (ROOT / service["build"]["dockerfile"]).is_file()
    assert float(service["stop_grace_period"].rstrip("s")) >= config.server.shutdown_timeout + 15
    assert config.server.api_key_file == f"/run/secrets/{service['secrets'][0]}"
    assert service["volumes"] == [f"{name}:/cache" for name in content["volumes"]]


def test_a_misspelt_field_of_compose_is_found():
    (content,) = documents("compose/compose.yaml")
    content["services"]["omniloop"]["cap_dropped"] = ["ALL"]
    with pytest.raises(jsonschema.ValidationError, match="cap_dropped"):
        jsonschema.validate(content, COMPOSE)


# -- systemd, Ray


def test_the_unit_runs_our_command_and_waits_for_the_drain(tmp_path):
    unit = (DEPLOY / "systemd" / "omniloop.service").read_text()
    (content,) = documents("systemd/config.yaml")
    assert int(re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.M)[0]) >= config_of(content).server.shutdown_timeout + 20
    (command,) = re.findall(r"^ExecStart=\S+/omniloop (.+)$", unit, re.M)
    assert command.startswith("--config /etc/omniloop/config.yaml ")
    ((credential, source),) = re.findall(r"^LoadCredential=(\w+):(\S+)$", unit, re.M)
    assert f"--api-key-file ${{CREDENTIALS_DIRECTORY}}/{credential}" in command
    assert f"install -D -m 600 keys.txt {source}\n" in docs.text("deployment")
    assert "api-key-file" not in content
    (cache,) = re.findall(r"^CacheDirectory=(\w+)$", unit, re.M)
    folders = dict(re.findall(r"\b([A-Z]+_(?:HOME|CACHE_DIR))=(\S+)", unit))
    assert folders.keys() == {"HF_HOME", "TRITON_CACHE_DIR", "NUMBA_CACHE_DIR"}
    assert all(folder.startswith(f"/var/cache/{cache}/") for folder in folders.values())
    flags = parse(command.replace("--config /etc/omniloop/config.yaml", "").split())[1]
    assert flags.server.api_key_file.endswith("/keys")
    assert shutil.which("systemd-analyze") is None or verified(unit, tmp_path / "omniloop.service") == ""


def verified(unit: str, path: Path) -> str:
    """The output of `systemd-analyze verify` for the unit, whose command is replaced by /bin/true."""
    path.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", unit, flags=re.M))
    done = subprocess.run(["systemd-analyze", "verify", str(path)], capture_output=True, text=True, check=False)
    return "\n".join(line for line in done.stderr.splitlines() if path.name in line)


def test_the_serve_file_has_arguments_that_scaleout_takes():
    """The test parses scaleout's source and does not import the module, as Ray may be absent."""
    (content,) = documents("ray/serve.yaml")
    (application,) = content["applications"]
    module, _, name = application["import_path"].partition(":")
    tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    (arguments,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Arguments")
    known = {node.target.id for node in arguments.body if isinstance(node, ast.AnnAssign)}  # type: ignore[union-attr]
    assert application["args"].keys() <= known
    assert config_of(application["args"]["flags"]).model.max_model_len == 32_000
    page = docs.text("ray")
    assert set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| ((?:`\w+`(?:, )?)+)", page, re.M)))) == known


@pytest.mark.parametrize("page", docs.NAMES)
def test_files_that_a_page_names_are_there(page):
    for path in re.findall(r"examples/[\w/]+\.\w+|Dockerfile(?:\.\w+)?", docs.text(page)):
        assert (ROOT / path).is_file(), path
