"""Decoders: encoded bytes to the normal forms of `mm.item.MediaItem`. Pool only.

`import_codecs` imports the decoders' libraries off the loop before the first request. The import takes a seventh of a
second, and neither the start nor the first answer should wait for it.
"""


def import_codecs() -> None:
    """Import Pillow, PyAV and soxr (pool)."""
    import soxr  # noqa: F401

    from mm.decode.audio import codec_library
    from mm.decode.image import image_library

    image_library()
    codec_library()
