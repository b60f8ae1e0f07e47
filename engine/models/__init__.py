"""Models: one file per family, each with a FAMILY, in a package by kind; lookup.py finds the file by its name."""
