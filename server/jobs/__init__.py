"""Jobs: from the checked fields of a request to the engine's Request, with media, lengths and a grammar."""
