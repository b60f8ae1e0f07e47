"""Products with the matrices of adapters (LoRA): rows of a step that use different adapters."""
