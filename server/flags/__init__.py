"""Flags: the groups of Config, their parsing from the command line or a file, and the advice for flags of
other servers.
"""
