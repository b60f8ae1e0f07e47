"""Models: one file per family, each with its FAMILY, in a room by its kind; lookup.py finds the file by its name."""
