"""Attention kernels: paged (decoders, over block tables) and dense (towers, over segments). Thread: device."""
