"""Train with rayfed and with other projects' code side by side, and compare the weights; see README.md.

The exit code is 0 if everything agrees that is expected to agree, and differs where it is known to.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch

from references import afl, apfl, apple, feddyn, fedproto, fedreg, flbench, harmofl, moon, pfllib_methods, vhl
from references.checkout import Checkout, Unavailable
from references.harness import Comparison, OutOfStep, compare
from references.report import line, markdown, reasons

SOURCES: dict[str, Any] = {
    module.SOURCE: module
    for module in (pfllib_methods, flbench, moon, feddyn, apfl, fedproto, apple, fedreg, harmofl, vhl, afl)
}

NAMES = {
    "pfllib": "PFLlib",
    "flbench": "FL-bench",
    "moon": "authors",
    "feddyn": "authors",
    "fedtorch": "authors",
    "fedproto": "authors",
    "apple": "authors",
    "fedreg": "authors",
    "harmofl": "authors",
    "vhl": "authors",
    "fair": "q-FFL's authors",
}
"""What the projects are called in tables."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m references", description=__doc__)
    for name, module in SOURCES.items():
        parser.add_argument(f"--{name}", metavar="DIR", help=f"checkout: {module.__doc__.partition(':')[0]}")
    parser.add_argument("--method", nargs="+", metavar="NAME", help="compare these methods only")
    parser.add_argument("--markdown", action="store_true", help="also print the table as Markdown")
    args = parser.parse_args(argv)
    given = {name: path for name in SOURCES if (path := getattr(args, name)) is not None}
    if not given:
        parser.error(f"name a checkout with at least one of {', '.join(f'--{name}' for name in SOURCES)}")
    if unknown := set(args.method or ()) - {case.method for name in given for case in SOURCES[name].cases()}:
        parser.error(f"--method: the checkouts given have no comparison of {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)
    results: list[Comparison] = []
    failures = 0
    for name, path in given.items():
        try:
            done, failed = run(name, path, args.method)
        except Unavailable as error:
            print(error)
            done, failed = [], 1
        results += done
        failures += failed
    if texts := reasons(results):
        print("\nWhy some differ:\n" + "\n".join(f"- {text}" for text in texts))
    if args.markdown and results:
        print("\n" + markdown(results, NAMES))
    return 0 if not failures and all(result.as_expected for result in results) else 1


def run(name: str, path: str, methods: Sequence[str] | None) -> tuple[list[Comparison], int]:
    """Compare with one checkout; return the outcomes, and how many comparisons could not be made.

    Raises:
        Unavailable: There is no such checkout.
    """
    module = SOURCES[name]
    checkout = Checkout(name, path, module.TRIED)
    print(f"--{name}: commit {checkout.commit} (written for {module.TRIED})")
    results, failures = [], 0
    for case in module.cases():
        if methods and case.method not in methods:
            continue
        try:
            results.append(compare(case, checkout))
            print(line(results[-1]), flush=True)
        except (OutOfStep, Unavailable) as error:
            print(f"{case.method} / {name}: {error}", flush=True)
            failures += 1
    return results, failures


if __name__ == "__main__":
    sys.exit(main())
