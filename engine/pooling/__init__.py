"""Pooling: hidden states of an input -> one array. Thread: device."""
