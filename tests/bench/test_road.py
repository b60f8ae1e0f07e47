"""Bounds how much source a plain request runs, so that a plain request does not run code of special requests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.bench.road import cython_functions, python_functions

ROOT = Path(__file__).resolve().parents[2]
# If a bound is exceeded: put the code of special requests behind one condition of the plain path.
MOST_FUNCTIONS, MOST_LINES = 434, 3670  # 60 functions bound a client's resources: timers, places, shares, seats
# The engine without _fast. With the 1,443 lines of _fast (`road.py --cython`, without lane, detok and json_scan, which
# convert tokens to text) a step has at most 3,000 lines.
MOST_STEP_LINES = 1430
AGAIN = 3  # on a busy machine each request takes so long that a tick of the second falls into all of them


def measured() -> tuple[str, list[tuple[str, str, str]]]:
    """What road.py prints, and (part, functions, lines) of each part."""
    done = subprocess.run(
        [sys.executable, "tests/bench/road.py", "--list"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout, re.findall(r"^(server|engine|mm)  (\d+) functions  (\d+) lines", done.stdout, re.MULTILINE)


def test_a_plain_request_runs_few_functions():
    for _ in range(AGAIN):
        said, rows = measured()
        functions, lines = (sum(int(row[column]) for row in rows) for column in (1, 2))
        if functions <= MOST_FUNCTIONS and lines <= MOST_LINES:
            break
    assert {"server", "engine"} <= {name for name, *_ in rows}
    assert 200 < functions <= MOST_FUNCTIONS, said
    assert 2000 < lines <= MOST_LINES, said
    (step,) = (int(row[2]) for row in rows if row[0] == "engine")
    assert step <= MOST_STEP_LINES, said
    names = set(re.findall(r"^    ([\w.]+):", said, re.MULTILINE))
    assert {"create", "Answer.submit", "Executor.plan", "HostForward.launch", "EventStream.write"} <= names
    aside = {"special_fields", "check_special", "with_media", "with_grammar", "decode_large"}
    aside |= {"GrammarRows.fill", "Media._named", "Sampler._sample_special"}
    assert not names & aside


def test_lines_are_those_of_the_function_itself(tmp_path):
    path = tmp_path / "some.py"
    path.write_text(
        'class A:\n    @staticmethod\n    def one(x):\n        """Says."""\n\n        # why\n        def two():\n'
        "            return 1\n        return two\n"
    )
    assert python_functions(path) == {"A.one:3": {2, 3, 9}, "A.one.two:7": {7, 8}}


def test_functions_of_cython_end_where_their_indentation_does(tmp_path):
    path = tmp_path / "some.pyx"
    path.write_text(
        'cdef extern from "a.h":\n    int f(int x)\n\ncdef int g(\n    int x,\n) noexcept nogil:\n    return x\n\n'
        'class A:\n    def h(self):  # why\n        """Says\n        more."""\n        return 1\n    x = 2\n'
    )
    assert cython_functions(path) == {"g:4": {4, 5, 6, 7}, "h:10": {10, 13}}
