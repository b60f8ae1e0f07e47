"""Models that make vectors and scores alone: a file per family, named as its `model_type` in config.json."""
