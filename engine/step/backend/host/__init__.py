"""Steps on the CPU: a thread stands where an accelerator's stream would be."""
