"""Wire formats: what clients send, as typed structs. No logic; unknown fields are ignored, null means absent."""
