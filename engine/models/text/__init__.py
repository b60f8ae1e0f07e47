"""Text decoders: a file per family, named by its `model_type` in config.json."""
