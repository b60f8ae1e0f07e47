"""Fuzzing: damaged inputs at every door, drawn and made smaller by hypothesis.

`targets` has what is called with which seeds; `test_fuzz` runs each target for a second in `make test`, and for longer
in `make test-full`. `python -m tests.fuzz SECONDS` shares so much time among all targets.
"""
