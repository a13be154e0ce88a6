"""The former command `python -m rayfed.run`, now `rayfed run`."""

import sys

from rayfed.cli.former import former_command

former_command(__name__, "run", sys.argv[1:])
