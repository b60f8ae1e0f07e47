"""Adapters (LoRA) that requests choose by name: files, names, packing, and their homes in memory."""
