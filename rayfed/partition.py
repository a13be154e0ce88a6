"""The former command `python -m rayfed.partition`, now `rayfed partition`."""

import sys

from rayfed.cli.former import former_command

former_command(__name__, "partition", sys.argv[1:])
