"""Configuration files of a checkpoint -> numbers; what differs by family is an argument (models/base/family.py)."""
