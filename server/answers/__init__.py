"""Answers: the state of a request from its submission to the engine until the client has its stream or body."""
