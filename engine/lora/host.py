"""HostMemory: the places of adapters on a CPU, which are references to panels.

Owner: Places (engine/lora/places.py), which fills a place on a thread of its own while no row uses the place.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine.layers.placed import PlacedSite, packed
from engine.lora.adapter import Adapter, PackedSite


class HostMemory:
    """The places of a model's sites; a Memory."""

    def __init__(self, sites: Mapping[str, PlacedSite]) -> None:
        self._sites = sites

    def fill(self, number: int, adapter: Adapter) -> None:
        found = {}
        for path, matrices in adapter.sites.items():
            assert isinstance(matrices, PackedSite), f"{path}: adapters of experts have no place here"
            found[path] = packed(matrices.a, matrices.b)
        for path, site in self._sites.items():
            site.held[number] = found.pop(path, None)
        assert not found, f"no place for {', '.join(found)}"
