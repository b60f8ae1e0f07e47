"""The KV cache: what layers store (spec), the layout of memory (layout, runs), the number of blocks (sizing)."""
