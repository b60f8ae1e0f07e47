"""What families are made of: Model, the decoder and the encoder, Family, and how names of classes are read."""
