"""The protocol of text-embeddings-inference: vectors, vocabulary weights, classes and ranks of texts."""
