"""Media on the CPU: pictures, sound and films from bytes to the arrays that towers read.

Runs on the loop (fetching, budgets) and in the pool (decoding, transforms); never touches a device. The names below are
what the server uses. Codec libraries are imported by the functions that need them, so importing this package is cheap.
"""

from mm.errors import MediaError
from mm.item import MediaItem, MediaOptions, MediaRef, Processed
from mm.limits import MediaLimits

__all__ = ["MediaError", "MediaItem", "MediaLimits", "MediaOptions", "MediaRef", "Processed"]
