"""From logits to token ids: the order of operations, and the per-request rules that change logits."""
