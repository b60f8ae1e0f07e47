"""Loads checkpoints into packed weights: files (safetensors), table (name rules), load (reading), dummy (random)."""
