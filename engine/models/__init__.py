"""Models: config.json -> ModelConfig (hf), name -> class (registry), then one file per architecture."""
