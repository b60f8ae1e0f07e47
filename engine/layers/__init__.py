"""The parts of models: plain objects with slots that hold packed weights and call the kernels' launchers."""
