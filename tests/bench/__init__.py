"""Benchmarks: each prints a table and writes JSON if its option is given; none runs in the test suite."""
