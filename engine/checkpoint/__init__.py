"""Configuration files of a checkpoint -> numbers; what differs by family is an argument (engine/models/family.py)."""
