"""How checkpoints store weights (schemes), and which configuration names which of them. Thread: the builder's."""
