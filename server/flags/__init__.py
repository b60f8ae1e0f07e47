"""Flags: the groups of Config, made from the command line or a file, and the answers to flags of other servers."""
