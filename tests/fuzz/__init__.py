"""Fuzzing: every entry point gets damaged inputs, which hypothesis draws and shrinks.

`targets` lists the functions to call and their seeds. `test_fuzz` runs each target for a second in `make test`, and
longer in `make test-full`. `python -m tests.fuzz SECONDS` divides the time among all targets.
"""
