"""Lockstep comparisons of rayfed's methods with the code of other projects; see README.md."""
