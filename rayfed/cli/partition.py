"""`rayfed partition`: print, save or draw which client holds which examples."""

import argparse

from rayfed.cli.arguments import add_values, read_values
from rayfed.cli.help import VALUES, partition_keys
from rayfed.experiments.config import Config

_DESCRIPTION = """\
Divide a dataset among clients as a simulation would. Print one line per client and the hash of the partition.
The partition can be saved as a table that partition.name=file reads, and drawn.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"{VALUES}\n{partition_keys()}"
    parser.description = _DESCRIPTION
    add_values(parser, "FILE.yaml", "configuration as for rayfed run; only the keys below have an effect")
    parser.add_argument("--save", metavar="FILE", help="write the partition as Parquet, one row per example")
    parser.add_argument(
        "--plot", metavar="FILE", help="draw the number of examples by client and class as PNG, PDF or SVG"
    )
    parser.add_argument("--examples", metavar="FILE.png", help="draw sample images, one row per domain")


def execute(options: argparse.Namespace) -> int:
    config = Config.read(*read_values(options.values))
    from rayfed.data.loading import load_partitioned
    from rayfed.data.partitions.base import partition_hash
    from rayfed.data.partitions.file import save
    from rayfed.data.partitions.summary import class_counts, describe, save_contact_sheet
    from rayfed.reports.charts import chart, recorded

    data = config.data
    partition = config.partition
    dataset, parts = load_partitioned(
        data.name or "", data.options, partition.name, partition.options, config.leave_out, config.seed
    )
    print(describe(dataset, parts))
    if options.save:
        save(dataset, parts, options.save)
        no_validation = " partition.validation=0"
        if any(len(part.val) for part in parts):
            no_validation = ""
        print(f"saved: partition.name=file partition.file={options.save}{no_validation}")
    if options.plot:
        counts = class_counts(dataset, parts)
        domains = [dataset.client_domain(part) for part in parts]
        panel = recorded.counts_panel(range(len(parts)), domains, counts)
        digest = partition_hash(dataset, parts)
        caption = f"{dataset.name}: {counts.sum():,} examples for training, partition {digest}"
        chart.save(chart.Chart(panel, caption), options.plot)
        print(f"plot: {options.plot}")
    if options.examples:
        save_contact_sheet(dataset, options.examples)
        print(f"examples: {options.examples}")
    return 0
