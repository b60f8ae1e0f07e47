"""Models with towers for pictures, video or audio: a file per family, named by its `model_type` in config.json."""
