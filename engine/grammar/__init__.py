"""Grammars: from a grammar's text to the bit mask of allowed tokens for each step."""
