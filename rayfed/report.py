"""The former command `python -m rayfed.report`, now `rayfed report`."""

import sys

from rayfed.cli.former import former_command

former_command(__name__, "report", sys.argv[1:])
