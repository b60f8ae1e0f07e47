"""Transforms: decoded media to the arrays that towers read. Pool only, numpy and Pillow."""
