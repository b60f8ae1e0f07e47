"""Processors: what each model family makes of pictures, sound and films. One file per family."""
