"""The command `python -m rayfed.partition`."""

import sys

from rayfed.cli.partition import main

if __name__ == "__main__":
    sys.exit(main())
