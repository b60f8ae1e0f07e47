"""How much of our source one plain streamed chat request runs: functions, their lines, their files.

The server runs in this process with the embedded model, on a CPU. Four requests follow one that warms up. The road is
the set of functions that ran in each of the four requests, from the first byte on the socket until the answer was
cleaned up; it excludes start-up, caches filled once, ticks and idle timers. A function's lines are those of its
signature and body without docstrings, comments and blank lines; an inner function counts separately. Only Python is
counted; with `--cython` _fast is compiled once more, into build/road, with Cython's profiling, so that its functions
count too.

Run: python tests/bench/road.py [--cython] [--list] [--root CHECKOUT], where CHECKOUT has its extensions built.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import http.client
import json
import os
import runpy
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

FOLDERS = ("server", "engine", "mm", "_fast")
TRACED = Path("build/road")
ROUNDS = 4  # each begins at another fraction of a second, so that no once-per-second tick falls into all rounds
BODY = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 12,
    "ignore_eos": True,
    "temperature": 0,
    "stream": True,
}

Place = tuple[str, int]  # a file relative to the root, and the first line of a function

BUILD = """
import runpy, sys
import Cython.Build
cythonize = Cython.Build.cythonize
def traced(extensions, **named):
    for extension in extensions:
        extension.define_macros.append(("CYTHON_TRACE_NOGIL", "1"))
        extension.extra_compile_args.append("-O1")
    directives = {**named["compiler_directives"], "profile": True, "show_performance_hints": False}
    return cythonize(extensions, **{**named, "build_dir": "FOLDER/c", "compiler_directives": directives})
Cython.Build.cythonize = traced
sys.argv = ["setup.py", "-q", "build_ext", "--build-lib", "FOLDER/lib", "--build-temp", "FOLDER/o"]
runpy.run_path("setup.py", run_name="__main__")
"""


class Recorder:
    """Records our functions that run, in any thread, while the recorder is on."""

    def __init__(self) -> None:
        self.is_on = False
        self.codes: set[CodeType] = set()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if self.is_on and event == "call":
            self.codes.add(frame.f_code)

    def take(self, root: Path) -> set[Place]:
        codes, self.codes = self.codes, set()
        found = set()
        for code in codes:
            path = Path(code.co_filename)
            path = path if path.is_absolute() else root / path
            if path.is_relative_to(root) and path.relative_to(root).parts[0] in FOLDERS:
                found.add((str(path.relative_to(root)), code.co_firstlineno))
        return found


def ask(port: int) -> None:
    """Sends the request and reads the answer to its last byte."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("POST", "/v1/chat/completions", json.dumps(BODY), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    text = answer.read().decode()
    assert answer.status == 200, text
    assert text.rstrip().endswith("data: [DONE]"), text
    connection.close()


class Announced:
    """Reads the server's stdout until the line with its address."""

    def __init__(self) -> None:
        self.stdout = os.fdopen(os.dup(1), "w")  # the original stdout, for the report
        read, write = os.pipe()
        os.dup2(write, 1)
        self._lines = os.fdopen(read)

    def port(self) -> int:
        """The port in the line. The process ends if the server ends before it listens."""
        return next(int(line.rpartition(":")[2]) for line in self._lines if line.startswith("Listening on "))


def measure(announced: Announced, recorder: Recorder, root: Path, shows_names: bool) -> None:
    """Runs in the client's thread: sends requests, counts, prints, ends the process."""
    sys.setprofile(None)
    status = 1
    try:
        port = announced.port()
        ask(port)
        rounds = []
        for number in range(ROUNDS):
            time.sleep(0.5)  # the server cleans up after the previous request
            time.sleep((number / ROUNDS - time.monotonic()) % 1.0)
            recorder.is_on = True
            ask(port)
            time.sleep(0.2)
            recorder.is_on = False
            rounds.append(recorder.take(root))
        with contextlib.redirect_stdout(announced.stdout):
            report(set.intersection(*rounds), root, shows_names)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        announced.stdout.flush()
        os._exit(status)


def report(places: set[Place], root: Path, shows_names: bool) -> None:
    """Prints a line per folder, the sum, and on request the functions."""
    functions = {
        path: python_functions(root / path) if path.endswith(".py") else cython_functions(root / path)
        for path, _ in places
    }
    road: dict[str, dict[str, int]] = {}
    for path, first in places:
        name = name_at(functions[path], first)
        if name is not None:
            road.setdefault(path, {})[name] = len(functions[path][name])
    table: dict[str, Counter[str]] = {}
    for path, lines in sorted(road.items()):
        for row in (path.partition("/")[0], "all"):
            table.setdefault(row, Counter()).update(functions=len(lines), lines=sum(lines.values()), files=1)
        if shows_names:
            print(f"{path}: {sum(lines.values())}")
            for name, count in sorted(lines.items()):
                print(f"    {name} {count}")
    for row in (*FOLDERS, "all"):
        if row in table:
            print(row, *(f"{count} {noun}" for noun, count in table[row].items()), sep="  ")


def name_at(functions: dict[str, set[int]], first: int) -> str | None:
    """The innermost function with this line; None if the line belongs to a class or a module."""
    return next((name for name, lines in functions.items() if first in lines), None)


def python_functions(path: Path) -> dict[str, set[int]]:
    """Function name -> its lines."""
    tree = ast.parse(path.read_text())
    text = path.read_text().splitlines()
    found: dict[str, set[int]] = {}

    def visit(node: ast.AST, prefix: str, outer: set[int]) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
                mine = {n for n in range(first, (child.end_lineno or first) + 1) if has_code(text[n - 1])}
                if ast.get_docstring(child, clean=False) is not None:
                    string = child.body[0]
                    mine -= set(range(string.lineno, (string.end_lineno or string.lineno) + 1))
                outer -= mine
                found[f"{prefix}{child.name}:{child.lineno}"] = mine
                visit(child, f"{prefix}{child.name}.", mine)
            else:
                visit(child, f"{prefix}{child.name}." if isinstance(child, ast.ClassDef) else prefix, outer)

    visit(tree, "", set())
    return found


def cython_functions(path: Path) -> dict[str, set[int]]:
    """Function name -> its lines, for a .pyx, found by indentation."""
    text = path.read_text().splitlines()
    found = {}
    for at, line in enumerate(text):
        head = line.split("(")[0].split()
        if not head or head[0] not in ("def", "cdef", "cpdef") or "(" not in line or "=" in line.split("(")[0]:
            continue
        depth = len(line) - len(line.lstrip())
        body, signature = at, without_comment(line)
        while signature.count("(") > signature.count(")"):
            body += 1
            signature += without_comment(text[body])
        if not signature.endswith(":"):
            continue  # a declaration
        end = body + 1
        while end < len(text) and (not text[end].strip() or len(text[end]) - len(text[end].lstrip()) > depth):
            end += 1
        lines = {n + 1 for n in range(at, end) if has_code(text[n])}
        if text[body + 1].lstrip().startswith('"""'):
            last = body + 1
            while text[last].count('"""') + (last > body + 1) < 2:
                last += 1
            lines -= set(range(body + 2, last + 2))
        found[f"{head[-1]}:{at + 1}"] = lines
    return found


def without_comment(line: str) -> str:
    return line.partition("  #")[0].rstrip()


def has_code(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[2], help="the checkout that is counted")
    parser.add_argument("--cython", action="store_true", help="count _fast too, which is compiled with profiling first")
    parser.add_argument("--list", action="store_true", help="name the functions and their lines")
    asked = parser.parse_args()
    root = asked.root.resolve()
    os.chdir(root)
    sys.path[0] = str(root)
    if asked.cython:
        subprocess.run([sys.executable, "-c", BUILD.replace("FOLDER", str(TRACED))], check=True)
        import _fast

        _fast.__path__.insert(0, str(root / TRACED / "lib/_fast"))
    announced, recorder = Announced(), Recorder()
    threading.Thread(target=measure, args=(announced, recorder, root, asked.list), daemon=True).start()
    threading.setprofile(recorder)
    sys.setprofile(recorder)
    sys.argv = ["server", "--port", "0", "--host", "127.0.0.1", "--device", "cpu"]
    runpy.run_module("server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
