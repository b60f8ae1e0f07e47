"""Folders that are costly to make: the processes of a run share them, and so do later runs of the same sources."""

from __future__ import annotations

import atexit
import hashlib
import importlib.metadata
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


def new_folder(kind: str) -> Path:
    """An empty folder that is removed when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix=f"omniloop-{kind}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def made_once(kind: str, form: Any, make: Callable[[Path], Any]) -> Path:
    """The folder of a kind and form that `make` fills; callers only read it.

    Its name has a hash of the form and of all that it is made of: the file of `make`, the files in tests/ and the
    versions of transformers and torch.
    """
    sources = [*sorted(FOLDER.glob("*.py")), Path(make.__code__.co_filename), *sorted((FOLDER / "models").glob("*.py"))]
    digest = hashlib.sha256(repr(form).encode())
    for source in sources:
        digest.update(source.read_bytes())
    for package in ("transformers", "torch"):
        digest.update(importlib.metadata.version(package).encode())
    folder = Path(tempfile.gettempdir()) / f"omniloop-{kind}-{os.getuid()}-{digest.hexdigest()[:16]}"
    if not folder.is_dir():
        draft = Path(tempfile.mkdtemp(prefix="omniloop-draft-"))
        make(draft)
        try:
            draft.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(draft)
    return folder
