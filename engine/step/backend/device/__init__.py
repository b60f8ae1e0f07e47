"""Steps on an accelerator: plans in pinned records, forwards and choices recorded as graphs."""
