"""Steps on an accelerator: plans in pinned records, forwards and sampling recorded as graphs."""
