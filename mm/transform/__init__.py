"""Transforms: decoded media to the arrays that encoders read. Pool only, numpy and Pillow."""
