"""The layers that the adapters named at start change, from the headers of their files.

Thread: device, at start. In: a model with empty parts, names and folders of adapters. Out: paths of layers, so that
other layers need no places and no kernels. The loads that follow read the files again, and report their faults.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from engine.base.errors import AdapterError
from engine.lora.config import read_config
from engine.lora.files import opened
from engine.lora.plan import plan_of
from engine.lora.source import Source
from engine.lora.targets import targets_of
from engine.models.base.model import Model


def changed_by(model: Model, adapters: Sequence[tuple[str, str]]) -> Collection[str] | None:
    """The paths of the layers that the adapters (name, folder) change. None: a folder cannot be read now, for example
    because the adapter is on the hub."""
    targets, paths = targets_of(model), set[str]()
    try:
        for name, folder in adapters:
            with opened(Source(folder), name) as files:
                paths |= plan_of(files.tensors, read_config(files.config), targets).targets.keys()
    except AdapterError:
        return None
    return paths
