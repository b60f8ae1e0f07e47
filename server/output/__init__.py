"""Answers: from token ids and log-probabilities to text and the bodies of choices."""
