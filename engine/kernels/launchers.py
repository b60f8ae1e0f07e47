"""Gives every launcher that Triton loads a module object of its own.

Triton compiles a C module per signature of kernels, and all have one name. CPython keeps one object for such a name: if
a file is loaded for the second time, the object of the file that was loaded last gets the functions of the first. A
thread that has loaded a launcher and not yet read its function then gets the launcher of another kernel. Several
threads load launchers at a start (precompile), and several ranks later.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

_loading = threading.Lock()
LOAD = "_load_module_from_path"  # of triton.runtime.build, in versions that have it


def separate(build: Any) -> None:
    """Changes triton.runtime.build; further calls change nothing."""
    load = getattr(build, LOAD, None)
    if load is None or getattr(load, "is_separate", False):
        return

    def load_alone(name: str, path: str) -> Any:
        with _loading:
            sys.modules.pop(name, None)
            return load(name, path)

    load_alone.is_separate = True  # type: ignore[attr-defined]
    setattr(build, LOAD, load_alone)
