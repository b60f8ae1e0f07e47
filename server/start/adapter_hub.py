"""Fetch an adapter named ORG/NAME[@revision][/subfolder] from the hub: its configuration and its safetensors only.

Owner: a thread of the pool. In: the name, and the operator's settings of the hub. Out: a folder in huggingface_hub's
cache. Every failure is a one-line ConfigError; if the hub cannot be reached, a complete local copy is used.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace
from pathlib import Path

from engine.base.errors import ConfigError
from engine.checkpoint.pooling_tasks import ADAPTER_CONFIG
from engine.lora.load import LARGEST
from engine.weights.files import ADAPTER
from server.start.hub import Hub, Unreachable, check_room, download, listed, local_copy, one_line

NAME, REVISION, FOLDER = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", r"[\w.-]+", r"(?:/[\w-][\w.-]*)*"
SPEC = re.compile(rf"(?P<name>{NAME})(?:@(?P<revision>{REVISION}))?(?P<folder>{FOLDER})", re.ASCII)


def is_hub_adapter(path: str) -> bool:
    """Whether a path is looked up on the hub; a local folder of that name has precedence."""
    return SPEC.fullmatch(path) is not None and not Path(path).exists()


def fetch_adapter(path: str, hub: Hub, max_bytes: int) -> Path:
    """Downloads the adapter and returns its folder; `max_bytes`: --lora-max-bytes. Raises ConfigError."""
    found = SPEC.fullmatch(path)
    assert found is not None, "the caller has checked the form"
    name, folder = found["name"], found["folder"].lstrip("/")
    hub = replace(hub, revision=found["revision"] or "")
    files = [f"{folder}/{file}" if folder else file for file in (ADAPTER_CONFIG, ADAPTER)]

    from huggingface_hub import constants
    from huggingface_hub.errors import OfflineModeIsEnabled

    with one_line(name, hub):
        try:
            listing = listed(name, hub)
        except OfflineModeIsEnabled:
            return cached(name, hub, files, "HF_HUB_OFFLINE is set") / folder
        except Unreachable as error:
            return cached(name, hub, files, f"{constants.ENDPOINT} cannot be reached ({error})") / folder
        absent = [file for file in files if file not in listing.sizes]
        if absent:
            raise ConfigError(f"{hub.flag} {path}: the repository has no {' and no '.join(absent)}")
        size = listing.sizes[files[1]]
        if size > LARGEST * max_bytes:
            said = f"{files[1]} has {size} bytes; raise --lora-max-bytes for adapters of this size"
            raise ConfigError(f"{hub.flag} {path}: {said}")
        # A branch's name, so that the cache remembers its commit; the second file comes from the same commit.
        root = download(name, hub, hub.revision or constants.DEFAULT_REVISION, files[:1])
        if not (root / files[1]).exists():
            check_room(name, root, size)
            download(name, hub, root.name, files[1:])
        return root / folder


def cached(name: str, hub: Hub, files: list[str], reason: str) -> Path:
    """The folder of an earlier download. Raises ConfigError if it lacks a file."""
    from huggingface_hub.errors import IncompleteSnapshotError

    with contextlib.suppress(IncompleteSnapshotError):
        root = local_copy(name, hub, files)
        if root is not None and all((root / file).exists() for file in files):
            return root
    raise ConfigError(f"{hub.flag} {name}: {reason}, and this machine has no complete copy of the adapter")
