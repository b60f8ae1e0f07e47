"""Reads a checkpoint's configuration files; differences between families are arguments (models/base/family.py)."""
