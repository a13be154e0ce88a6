"""Data: datasets, how their files are read, how they are divided among clients, and what the engine is given."""
