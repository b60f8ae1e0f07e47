"""Decoders of text: a file per family, named as its `model_type` in config.json."""
