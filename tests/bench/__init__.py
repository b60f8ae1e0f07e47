"""Benchmarks: each prints a table and writes JSON when asked; none runs in the test suite."""
