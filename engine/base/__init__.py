"""Requests, outputs, errors, limits, configurations and counts, which every package of the engine imports."""
