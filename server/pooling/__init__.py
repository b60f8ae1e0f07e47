"""Inputs that become arrays: tokenized, sent to the engine as one request, normalised, formatted. Runs on the loop."""
