"""Structured output: turns a request's schemas, expressions, tags and tool calls into grammars for the engine."""
