"""Media on the CPU: pictures, sound and films, from encoded bytes to the arrays that encoders (towers) read.

Fetching and budgets run on the loop, decoding and transforms in the pool; this package never touches a device. The
server imports the names below. Functions import codec libraries when they need them, so importing this package is
cheap.
"""

from mm.errors import MediaError
from mm.item import MediaItem, MediaOptions, MediaRef, Processed
from mm.limits import MediaLimits

__all__ = ["MediaError", "MediaItem", "MediaLimits", "MediaOptions", "MediaRef", "Processed"]
