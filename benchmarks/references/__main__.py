"""Train with rayfed and with other projects' code side by side, and compare the weights; see README.md.

A comparison whose checkout is missing, of another commit or changed, or lacks a package, is skipped. The exit code is 0
if comparisons ran, and each agrees that is expected to agree, and differs where it is known to.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from references import (
    afl,
    apfl,
    apple,
    dbe,
    fedbr,
    feddyn,
    fedfomo,
    fedproto,
    fedreg,
    flamby,
    flbench_methods,
    fraug,
    harmofl,
    huawei,
    moon,
    pfllib_methods,
    vhl,
)
from references.checkout import Checkout, Unavailable
from references.harness import Comparison, OutOfStep, compare
from references.report import line, markdown, reasons, title

SOURCES: dict[str, Any] = {
    module.SOURCE: module
    for module in (
        pfllib_methods,
        flbench_methods,
        flamby,
        moon,
        feddyn,
        apfl,
        fedproto,
        apple,
        fedreg,
        harmofl,
        vhl,
        afl,
        huawei,
        fedbr,
        fraug,
        dbe,
        fedfomo,
    )
}

NAMES = {
    "pfllib": "PFLlib",
    "flbench": "FL-bench",
    "flamby": "FLamby",
    "moon": "The methods' authors",
    "feddyn": "The methods' authors",
    "fedtorch": "The methods' authors",
    "fedproto": "The methods' authors",
    "apple": "The methods' authors",
    "fedreg": "The methods' authors",
    "harmofl": "The methods' authors",
    "vhl": "The methods' authors",
    "huawei": "Gen-AFL's authors",
    "fedbr": "FedDebias's authors",
    "fraug": "The methods' authors",
    "fair": "q-FFL's authors",
    "dbe": "The methods' authors",
    "fedfomo": "The methods' authors",
}
"""What the projects are called in headings."""


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
    outcomes = [run(name, path, args.method) for name, path in given.items()]
    results = [result for outcome in outcomes for result in outcome.results]
    skipped, failures = sum(outcome.skipped for outcome in outcomes), sum(outcome.failures for outcome in outcomes)
    print(f"\n{len(results)} comparisons ran, {skipped} were skipped, {failures} failed")
    if texts := reasons(results):
        print("\nWhy some differ:\n" + "\n".join(f"- {text}" for text in texts))
    if args.markdown and results:
        print("\n" + markdown(results, NAMES))
    return 0 if results and not failures and all(result.as_expected for result in results) else 1


@dataclass
class Outcome:
    """What came of the comparisons with one checkout: those that ran, and the numbers of those that did not."""

    results: list[Comparison] = field(default_factory=list)
    skipped: int = 0
    failures: int = 0


def run(name: str, path: str, methods: Sequence[str] | None) -> Outcome:
    """Compare with one checkout. Without the code that a comparison was written for, it is skipped."""
    module = SOURCES[name]
    cases = [case for case in module.cases() if not methods or case.method in methods]
    outcome = Outcome()
    try:
        checkout = Checkout(name, path, module.TRIED)
        checkout.verify()
    except Unavailable as error:
        print(f"{error}; {len(cases)} comparisons skipped", flush=True)
        outcome.skipped = len(cases)
        return outcome
    print(f"--{name}: commit {module.TRIED}")
    for case in cases:
        try:
            outcome.results.append(compare(case, checkout))
            print(line(outcome.results[-1]), flush=True)
        except Unavailable as error:
            print(f"{title(case)}: skipped; {error}", flush=True)
            outcome.skipped += 1
        except OutOfStep as error:
            print(f"{title(case)}: {error}", flush=True)
            outcome.failures += 1
    return outcome


if __name__ == "__main__":
    sys.exit(main())
