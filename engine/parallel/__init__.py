"""Models that are dealt out over the ranks of an engine."""
