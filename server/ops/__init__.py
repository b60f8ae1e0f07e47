"""Operation: metrics, logs, timelines and spans, and the limits shared by all requests."""
