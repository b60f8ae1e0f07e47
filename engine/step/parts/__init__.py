"""Capabilities of the step, one file each (part.py is their base), listed in order.py in the order of their hooks."""
