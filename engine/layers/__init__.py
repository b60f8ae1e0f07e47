"""The parts models are made of: plain objects with slots that hold packed weights and call the kernels' launchers."""
