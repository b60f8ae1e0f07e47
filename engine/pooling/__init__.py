"""Pooling: turns the hidden states of an input into one array. Thread: device."""
