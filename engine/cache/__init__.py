"""The KV cache: what layers keep (spec), which share tables and where bytes lie (layout), how much fits (sizing)."""
