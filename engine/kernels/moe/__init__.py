"""Experts: which experts a token chooses, their products, and the sum of what they made. Thread: device."""
