"""Cohere's protocol: /v2/embed. /v2/rerank has the body of our own /v1/rerank."""
