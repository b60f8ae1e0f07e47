"""Decoders: encoded bytes to the normal forms of `mm.item.MediaItem`. Pool only.

`import_codecs` loads the libraries behind them ahead of the first request, off the loop: importing them takes a
seventh of a second, which no start-up and no first answer should wait for.
"""


def import_codecs() -> None:
    """Import Pillow, PyAV and soxr (pool)."""
    import soxr  # noqa: F401

    from mm.decode.audio import codec_library
    from mm.decode.image import image_library

    image_library()
    codec_library()
