"""Structured output: schemas, expressions, tags and tool calls of a request, written as grammars of the engine."""
