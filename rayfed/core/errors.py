"""The errors that rayfed raises on purpose."""


class UsageError(ValueError):
    """Something the user asked for cannot be done; the message is one line: what is wrong, where, what is right.

    The commands print it and exit with code 2, before anything has started.
    """


class Diverged(RuntimeError):
    """Training produced a value that is not finite; the message names the round, the client and the value."""


class HostLost(RuntimeError):
    """A host did not start, or died; what was recorded and checkpointed so far is kept."""


class BadHook(RuntimeError):
    """A hook of an algorithm did not do what the interface asks; the message names its class and the hook."""
