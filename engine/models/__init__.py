"""Models: one file per family, each with its FAMILY; registry.FAMILIES names the file of every architecture."""
