"""Who holds what: `python -m rayfed.partition [file.yaml …] [key=value …] [--save FILE] [--plot FILE.png]
[--examples FILE.png]`.

Divides data.* by partition.* as a simulation would, prints a line for each client and the partition's hash, and writes
the partition as a table that partition.name=file reads, or as a picture; or a sheet of images of every domain.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from rayfed.cli.interrupts import command
from rayfed.core.errors import UsageError
from rayfed.data.contact_sheet import save_contact_sheet
from rayfed.data.loading import load_partitioned
from rayfed.data.partitions import plot as picture
from rayfed.data.partitions.summary import describe
from rayfed.data.partitions.table import save
from rayfed.experiments.config import Config
from rayfed.experiments.sources import from_arguments, from_file


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 0, or 2 after one line on what was wrong with the request."""
    parser = _Parser(
        prog="python -m rayfed.partition", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("given", nargs="*", metavar="KEY=VALUE", help="as for rayfed.run; data.* and partition.* count")
    parser.add_argument("--save", metavar="FILE", help="write the partition as Parquet, a row for each example held")
    parser.add_argument("--plot", metavar="FILE.png", help="write a picture of clients and classes")
    parser.add_argument("--examples", metavar="FILE.png", help="write a sheet of images, a row for each domain")
    try:
        asked = parser.parse_intermixed_args(arguments)
        files = [given for given in asked.given if "=" not in given]
        config = Config.read(*map(from_file, files), from_arguments([given for given in asked.given if "=" in given]))
        for path in filter(None, (asked.plot, asked.examples)):
            picture.check_path(path)
        data, partition = config.data, config.partition
        dataset, parts = load_partitioned(
            data.name or "", data.options, partition.name, partition.options, config.leave_out
        )
        print(describe(dataset, parts))
        if asked.save:
            save(dataset, parts, asked.save)
            no_validation = "" if any(len(part.val) for part in parts) else " partition.validation=0"
            print(f"saved: partition.name=file partition.file={asked.save}{no_validation}")
        if asked.plot:
            picture.draw(dataset, parts, asked.plot)
            print(f"plot: {asked.plot}")
        if asked.examples:
            save_contact_sheet(dataset, asked.examples)
            print(f"examples: {asked.examples}")
    except UsageError as error:
        print(f"rayfed: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
