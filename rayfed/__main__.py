"""`python -m rayfed`, the same as the console script `rayfed`."""

import sys

from rayfed.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
