"""HostMemory: the places of adapters on a CPU, which are references to panels.

Owner: Places (engine/lora/places.py), which fills a place on a thread of its own while no row uses the place.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine.layers.placed import PlacedExperts, PlacedSite
from engine.lora.adapter import Adapter


class HostMemory:
    """The places of a model's sites; a Memory."""

    def __init__(self, sites: Mapping[str, PlacedSite | PlacedExperts]) -> None:
        self._sites = sites

    def fill(self, number: int, adapter: Adapter) -> None:
        unknown = adapter.sites.keys() - self._sites.keys()
        assert not unknown, f"no place for {', '.join(unknown)}"
        for path, site in self._sites.items():
            matrices = adapter.sites.get(path)
            site.hold(number, None if matrices is None else (matrices.a, matrices.b))
