"""Quantisation schemes of checkpoints, and how the configuration selects them. Thread: the model's builder."""
