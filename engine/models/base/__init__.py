"""The bases of all families: Model, decoder, encoder, Family, and the reading of class names."""
