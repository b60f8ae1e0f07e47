"""Operation: metrics, logs, timelines and spans, and the limits that a request takes its share of."""
