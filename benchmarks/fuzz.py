"""Thousands of damaged and hostile files for every reader: rows, tables, manifests, arrays, images, YAML and others.

Each must be read, or refused in one line, within ten seconds of the processor and three gigabytes of memory; nothing
may be written, or only where the reader may write. Readers and files are those of `tests/helpers/hostile_files.py`.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from helpers.fuzzing import fuzz
from helpers.hostile_files import READERS


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--readers", nargs="+", choices=list(READERS), default=list(READERS), help="what to try")
    parser.add_argument("--count", type=int, default=2000, help="files for each reader; slow ones get a share of it")
    parser.add_argument("--seed", type=int, default=0, help="of the changes")
    parser.add_argument("--reasons", type=int, default=0, help="print the most frequent reasons of refusals")
    args = parser.parse_args(argv)
    print(f"{'reader':20} {'tried':>7} {'read':>7} {'refused':>7} {'faults':>7} {'seconds':>8}")
    faults = 0
    with tempfile.TemporaryDirectory() as folder:
        for name, found in fuzz(args.readers, args.count, Path(folder), args.seed):
            numbers = f"{found.tried:7,} {found.read:7,} {found.refused:7,} {len(found.faults):7,}"
            print(f"{name:20} {numbers} {found.seconds:8.1f}", flush=True)
            for reason, count in found.reasons.most_common(args.reasons):
                print(f"  {count:7,} {reason}")
            for fault in found.faults:
                print(f"  {fault}")
            faults += len(found.faults)
    if faults:
        sys.exit(f"{faults} inputs were neither read nor refused in one line")


if __name__ == "__main__":
    main()
