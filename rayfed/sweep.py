"""The command `python -m rayfed.sweep`."""

import sys

from rayfed.cli.sweep import main

if __name__ == "__main__":
    sys.exit(main())
