"""Drafters: small models over a target's hidden states, which guess the target's next tokens."""
