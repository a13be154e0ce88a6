"""Exceptions that rayfed raises deliberately, and the numbers of the system's errors that it treats alike."""

import errno

FULL = (errno.ENOSPC, errno.EDQUOT)
"""The numbers of the errors that say that a disk or a quota is full."""


class UsageError(ValueError):
    """The configuration or the arguments are invalid.

    The message is one line that says what is wrong, where, and what is allowed. The commands print it and exit with
    code 2 before anything has started. Characters in it that do not show, as keys and file names may have them, are
    written as escapes.
    """

    def __init__(self, message: str = ""):
        shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in message)
        super().__init__(shown)


class Diverged(RuntimeError):
    """Training produced a value that is not finite. The message names the round, the client and the value."""


class HostLost(RuntimeError):
    """A process of Ray did not start or died. Everything recorded and checkpointed before that is kept."""


class RayNotStarted(HostLost):
    """Ray is not installed or did not start. The message has the folder of its logs and what to do."""


class BadHook(RuntimeError):
    """A hook of an algorithm violates the interface. The message names the class and the hook."""


class StorageError(RuntimeError):
    """Results could not be written or read, for example because the disk is full. Everything saved before is kept."""
