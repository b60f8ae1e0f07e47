"""Recurrent layers over states in pages: gated delta rule, Mamba-2, Mamba-1, and the short convolution before them.

A row's state is the run at its base position and, in a ring by position, the inputs of the positions behind it
(engine/attention/state_meta). Rows whose positions behind the base fit in the ring take a step kernel, the others the
scan's kernels; both kinds may be in one step.
"""
