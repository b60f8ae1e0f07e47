"""Builds the Cython extensions of `_fast`: one per .pyx, found by glob, with one directive table for all.

Generated C goes to build/. OMNILOOP_DEBUG=1 turns every Cython check on; OMNILOOP_ANNOTATE=1 also writes the
annotate report (build/_fast/*.html); OMNILOOP_BUILD_JOBS is the number of files that are built in parallel. Cython's
performance hints are printed, and a test fails on them.
"""

import os
import re
import runpy
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path

import Cython
import setuptools
from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist

if int(setuptools.__version__.partition(".")[0]) < 77:
    sys.exit(
        f"setuptools {setuptools.__version__} cannot read the licence in pyproject.toml; "
        "run pip install --upgrade pip 'setuptools>=77'"
    )
VERSION = Cython.__version__
if VERSION.startswith("3.3.0") or tuple(map(int, re.findall(r"\d+", VERSION)[:2])) < (3, 1):
    sys.exit(
        f"Cython {VERSION} is not built with: 3.3.0 miscounts shared memory views (servers end with 'Acquisition count "
        "is -1'), versions before 3.1 lack directives that are used; run pip install 'cython>=3.1,!=3.3.0'"
    )

DEBUG = os.environ.get("OMNILOOP_DEBUG", "") == "1"
ANNOTATE = os.environ.get("OMNILOOP_ANNOTATE", "") == "1"

DIRECTIVES = {
    "language_level": 3,
    "boundscheck": DEBUG,
    "wraparound": DEBUG,
    "initializedcheck": DEBUG,
    "cdivision": not DEBUG,
    "overflowcheck": DEBUG,
    "freethreading_compatible": True,
    "show_performance_hints": True,
    "embedsignature": True,
}

CFLAGS = ["-O3", "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wno-unused-function", "-Wno-unreachable-code"]
LDFLAGS = [] if sys.platform == "darwin" else ["-pthread"]


# Number of files that are translated and compiled in parallel; pip passes no number.
JOBS = int(os.environ.get("OMNILOOP_BUILD_JOBS") or min(8, os.cpu_count() or 1))


def write_layout() -> None:
    """Writes `_fast/layout.pxd` from `_fast/layout.py`, but only if it changes: its age decides what is rebuilt."""
    path = Path("_fast/layout.pxd")
    text = runpy.run_path("_fast/layout.py")["declarations"]()
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def extensions() -> list[Extension]:
    """One extension per _fast/*.pyx; C sources in _fast/c/<name>/ belong to <name>.pyx."""
    found = []
    for pyx in sorted(Path("_fast").glob("*.pyx")):
        own = Path("_fast/c") / pyx.stem
        found.append(
            Extension(
                f"_fast.{pyx.stem}",
                [str(pyx), *(str(c) for c in sorted(own.glob("*.c")))],
                include_dirs=["_fast", str(own)],
                depends=[str(h) for h in [*sorted(own.glob("*.h")), *sorted(Path("_fast").glob("*.pxd"))]],
                extra_compile_args=CFLAGS,
                extra_link_args=LDFLAGS,
            )
        )
    return found


class Extensions(build_ext):
    """Compiles as many files in parallel as Cython translates."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or JOBS or None


class SourceArchive(sdist):
    """Adds the sources of the extensions to the source archive; setuptools' list of packages lacks them."""

    def make_distribution(self) -> None:
        folder = Path("_fast")
        self.filelist.extend(str(path) for kind in ("pyx", "pxd", "c", "h") for path in folder.rglob(f"*.{kind}"))
        self.filelist.append("CHANGELOG.md")
        self.filelist.exclude_pattern("tests/*", anchor=True)  # setuptools adds files named test*.py
        super().make_distribution()


def check_compiler() -> None:
    """Ends the build with one sentence if no C compiler or no headers are found; pip would print pages of output."""
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    words = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    if shutil.which(words[0]) is None:
        sys.exit(
            f"{words[0]}: there is no such C compiler; run apt install gcc libc6-dev, or dnf install gcc, "
            "or set CC to another compiler"
        )
    headers = sysconfig.get_path("include")
    if not Path(headers, "Python.h").is_file():
        sys.exit(
            f"{headers}/Python.h: there is no such file, and the compiler needs the headers of Python {version}; "
            f"run apt install python{version}-dev, or dnf install python3-devel"
        )


def modules() -> list[Extension]:
    """The extensions to compile; a source archive needs none."""
    if "sdist" in sys.argv:
        return []
    check_compiler()
    return cythonize(extensions(), build_dir="build", compiler_directives=DIRECTIVES, annotate=ANNOTATE, nthreads=JOBS)


if __name__ == "__main__":  # where processes do not fork, the translating ones import this file
    write_layout()
    setup(cmdclass={"build_ext": Extensions, "sdist": SourceArchive}, ext_modules=modules())
