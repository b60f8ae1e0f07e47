"""Processors: how each model family turns pictures, sound and films into model inputs. One file per family."""
