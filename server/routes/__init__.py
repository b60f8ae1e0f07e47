"""Handlers, one file per endpoint family: validate, render, submit, stream."""
