"""Ground: requests, outputs, errors, limits, configurations and counts; every room of the engine imports it."""
