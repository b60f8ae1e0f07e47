"""Inputs that become arrays: tokenized, sent to the engine as one, normalised, written down. Lives on the loop."""
