"""Recurrent layers over states in pages: gated delta rule, Mamba-2, Mamba-1, and the short convolution before them.

A row has a run that holds its state at a base position, and a tail: a ring that holds the inputs of the positions
after the base (engine/attention/state_meta). A row is short if its positions after the base fit in the ring. A step
kernel computes short rows, the scan's kernels compute long rows; one step may have both.
"""
