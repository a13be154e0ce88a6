"""`python -m rayfed.sweep`, the same as `rayfed sweep`."""

import sys

from rayfed.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["sweep", *sys.argv[1:]]))
