"""The command `python -m rayfed.run`."""

import sys

from rayfed.cli.run import main

if __name__ == "__main__":
    sys.exit(main())
