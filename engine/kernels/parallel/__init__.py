"""Kernels that exchange rows between the ranks of an engine, over memory that every rank can address."""
