"""The KV cache: what layers keep (spec), how it is laid out in bytes (layout), and the device tensors (pool)."""
