"""Protocols of other servers: one folder each, with the bodies, the routes and the frames of one protocol."""
