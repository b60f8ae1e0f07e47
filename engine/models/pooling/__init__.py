"""Models that make only vectors and scores: a file per family, named by its `model_type` in config.json."""
