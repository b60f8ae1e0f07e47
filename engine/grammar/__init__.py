"""Grammars: what an answer may say, from its text to the bits of allowed tokens for each step."""
