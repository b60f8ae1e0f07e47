"""From checkpoint to packed weights: files (safetensors), table (the rules), load (stream, check), dummy (random)."""
