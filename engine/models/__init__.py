"""Models: one file per family, each with its FAMILY; registry.py names the file of every architecture."""
