"""MediaReport: counts and times of the media of one request, for its answer, its log line and the metrics.

Owner: loop; an ItemJob's pool thread has written its times before the loop reads them. Times are seconds; the times of
items that load concurrently add up. A cached item is neither decoded nor prepared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mm.item import Processed, Replaced


@dataclass(slots=True)
class MediaReport:
    """Sums over the items of a request."""

    items: int = 0
    cached: int = 0  # found in the processor cache
    encoded_bytes: int = 0  # bytes as received, before decoding
    fetch_s: float = 0.0  # from another server
    decode_s: float = 0.0  # header and pixels, samples or frames
    prepare_s: float = 0.0  # the processor: scaling, patches, spectrograms
    replaced: list[tuple[int, Replaced]] = field(default_factory=list)  # (number of the item, its replaced frames)

    def note_replaced(self, loaded: Sequence[Processed]) -> None:
        """Note the replaced frames of all items, after every item has been loaded."""
        self.replaced += [(at, item.replaced) for at, item in enumerate(loaded) if item.replaced]
