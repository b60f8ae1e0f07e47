"""Answers: an engine request on its way to the client, as an event stream or as one body."""
