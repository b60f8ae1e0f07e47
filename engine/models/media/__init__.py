"""Models with towers of pictures, films or sound: a file per family, named as its `model_type` in config.json."""
