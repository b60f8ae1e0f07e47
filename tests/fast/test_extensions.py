"""The build of scheduler and lanes: no output, no performance hints, and no Python calls in inner functions.

A slow test also runs the modules' own tests with every Cython check on. The build for that test is made in a copy of
the tree:
    OMNILOOP_DEBUG=1 python setup.py build_ext --inplace
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOM = (
    "blocks", "checkpoints", "detok", "device_calls", "drafts", "encoder", "entries", "gap_clock", "graph_table",
    "histogram", "kinds", "lane", "launcher", "names", "params", "plan", "planner", "prefix", "queue", "repeats",
    "ring", "running", "scheduler", "seqs", "settle", "shares", "states", "steady", "tables", "turns",
)  # fmt: skip
WALKS = (
    "test_drafts_walk", "test_lane", "test_parts_walk", "test_plan", "test_prefix_walk", "test_scheduler_walk",
    "test_seqs", "test_states", "test_states_walk", "test_steady",
)  # fmt: skip


DIRECTIVES = ("boundscheck=False", "wraparound=False", "initializedcheck=False", "cdivision=True")
DIRECTIVES += ("freethreading_compatible=True", "show_performance_hints=True")


def built(name: str) -> str:
    """The C of a module from the last build by make, which printed nothing; or "" if another build made it.

    The build opens its log before it translates, and a log that stays empty has the age of that moment.
    """
    code, log = ROOT / "build" / "_fast" / f"{name}.c", ROOT / "build" / "build.log"
    if not code.exists() or not log.exists() or log.stat().st_size:
        return ""
    sources = [ROOT / "_fast" / f"{name}.pyx", *(ROOT / "_fast").glob("*.pxd")]
    if code.stat().st_mtime < max(path.stat().st_mtime for path in (log, *sources)):
        return ""
    text = code.read_text()
    return "" if "checking_overflow" in text else text  # a build with every check on


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    """The generated C of each module, and Cython's output during generation; what the build made is not made again."""
    found = {name: built(name) for name in ROOM}
    names = [name for name in ROOM if not found[name]]
    if not names:
        return found, ""
    folder = tmp_path_factory.mktemp("cython")
    shutil.copytree(ROOT / "_fast", folder / "_fast", ignore=shutil.ignore_patterns("*.so", "c", "*.c"))
    command = [sys.executable, "-m", "cython", "-3", "--warning-errors"]
    command += [word for directive in DIRECTIVES for word in ("-X", directive)]
    command += [f"_fast/{name}.pyx" for name in names]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found |= {name: (folder / "_fast" / f"{name}.c").read_text() for name in names}
    return found, done.stdout + done.stderr


def test_cython_has_no_performance_hint_and_no_warning(generated):
    assert generated[1].strip() == ""


def nogil_bodies(source, code):
    """(name, C body) of each cdef function declared nogil."""
    for name in re.findall(r"^ *cdef (?:inline )?[\w* ]*?(\w+)\([^)]*\) noexcept nogil:", source, re.MULTILINE):
        pattern = rf"^static [^\n;]*?__pyx_f_5_fast_\w*?{name}\([^;{{]*?\) {{\n(.*?)^}}\n"
        bodies = re.findall(pattern, code, re.MULTILINE | re.DOTALL)
        assert bodies, f"{name} is not in the generated C: the pattern of this test is out of date"
        yield from ((name, body) for body in bodies)


@pytest.mark.parametrize("name", ROOM)
def test_inner_functions_never_touch_python(name, generated):
    source = (ROOT / "_fast" / f"{name}.pyx").read_text()
    functions = list(nogil_bodies(source, generated[0][name]))
    for function, body in functions:
        touched = re.findall(r"\b(?:Py[A-Z]\w+\(|__Pyx_(?:Raise|GetAttr|PyObject|With|Ensure)\w*\(|Py_[A-Z]+REF)", body)
        assert not touched, f"{name}.{function}: {sorted(set(touched))}"
    assert functions


def test_no_public_method_releases_the_lock_in_a_loop():
    for name in ROOM:
        for method in re.split(r"\n    def ", (ROOT / "_fast" / f"{name}.pyx").read_text())[1:]:
            assert method.split("\n    cdef ")[0].count("with nogil:") <= 1
            assert not re.search(r"\n {12,}with nogil:", method), f"{name}: {method.splitlines()[0]}"


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_walks_pass_with_every_check_of_cython_on(tmp_path):
    """Checks bounds, wraparound, None, overflow and division; any failure in a nogil function is an error."""
    (tmp_path / "_fast").mkdir()
    for path in (ROOT / "_fast").iterdir():
        if path.suffix in (".pxd", ".py") or (path.stem in (*ROOM, "clock") and path.suffix == ".pyx"):
            shutil.copy(path, tmp_path / "_fast")
    # Without optimization the C compiler needs a third of the time.
    (tmp_path / "setup.py").write_text((ROOT / "setup.py").read_text().replace('"-O3"', '"-O0", "-g0", "-w"'))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "README.md").write_text("")
    shutil.copytree(ROOT / "tests" / "fast", tmp_path / "tests" / "fast", ignore=shutil.ignore_patterns("__pycache__"))
    environment = {**os.environ, "OMNILOOP_DEBUG": "1"}
    walks = [f"tests/fast/{name}.py" for name in WALKS]
    for command in (
        [sys.executable, "-W", "ignore", "setup.py", "-q", "build_ext", "--inplace"],
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not full", *walks],
    ):
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
