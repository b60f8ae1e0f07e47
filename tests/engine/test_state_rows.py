"""Blocks of a run say whether it holds a state or a tail, and where a group of layers finds its own."""

import torch

from engine.cache.runs import runs_over
from engine.cache.state import StateSpec
from engine.kernels.state.places import Part

F32 = torch.float32


def test_runs_of_unlike_layers_differ_in_their_number_of_blocks():
    """A state and a tail have equally many pages in total, but in different groups."""
    low, high = (StateSpec((Part(rows, 64, F32),), (Part(tail, 64, F32),), 1, 1) for rows, tail in ((1, 3), (3, 1)))
    runs = runs_over({low: [0], high: [1]}, [256])
    assert (runs.state_blocks, runs.tail_blocks) == (4, 5)
    assert runs.columns_of(4) == [0, 3, 4, 5]
    assert runs.columns_of(5) == [0, 1, 2, 3, 4]
