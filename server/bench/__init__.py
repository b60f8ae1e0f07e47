"""python -m server bench: measures a server from its clients' side, the engine alone, and single kernels and parts."""
