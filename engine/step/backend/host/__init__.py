"""Steps on the CPU: a thread takes the role of an accelerator's stream."""
