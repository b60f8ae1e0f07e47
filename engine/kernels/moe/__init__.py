"""Experts: the choice of experts per token, the experts' products, and the sum of their results. Thread: device."""
