"""The two numbers of a client, as different types."""

from typing import NewType

ClientIndex = NewType("ClientIndex", int)
"""The position of a client in the population, by which the engine and algorithms refer to it."""

ClientId = NewType("ClientId", int)
"""The number that the partition gave to a client, by which tables, messages and users refer to it."""
