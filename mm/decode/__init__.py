"""Decoders: encoded bytes to the normal forms of `mm.item.MediaItem`. Pool only."""
