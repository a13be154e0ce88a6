"""`python -m rayfed.sweep`, the same as `rayfed sweep`. It is no module to import: that would hide `rayfed.sweep`."""

import sys

if __name__ != "__main__":
    raise ImportError("rayfed.sweep is a function of the package, and this module is not to be imported")

from rayfed.cli.main import main

sys.exit(main(["sweep", *sys.argv[1:]]))
