"""Backends run the steps: one folder per kind of device, with the same file names, behind the protocols of base.py."""
