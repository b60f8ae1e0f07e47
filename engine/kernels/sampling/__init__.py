"""Ops on logits: filter, penalise, draw, log-probabilities. One op per file; see each file's formula."""
