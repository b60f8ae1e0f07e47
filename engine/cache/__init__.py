"""The KV cache: what layers keep (spec), where bytes lie (layout, runs), how much fits (sizing)."""
