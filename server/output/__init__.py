"""Answers: token ids and log-probabilities in, text and the bodies of choices out."""
