"""Datasets, readers for their file formats, partitions among clients, and the population that the engine is given."""
