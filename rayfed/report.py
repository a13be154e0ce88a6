"""The command `python -m rayfed.report`."""

import sys

from rayfed.cli.report import main

if __name__ == "__main__":
    sys.exit(main())
