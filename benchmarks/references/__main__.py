"""Train with rayfed and with other projects' code side by side, and compare the weights; see README.md."""

import argparse
import sys
from collections.abc import Sequence

import torch

from references import afl, apple, feddyn, fedreg, flbench, harmofl, pfllib, vhl
from references.checkout import Checkout, Unavailable
from references.harness import Comparison, OutOfStep, compare

SOURCES = {module.SOURCE: module for module in (pfllib, flbench, feddyn, fedreg, apple, harmofl, vhl, afl)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m references", description=__doc__)
    for name, module in SOURCES.items():
        parser.add_argument(f"--{name}", metavar="DIR", help=f"a checkout, as of {module.TRIED}")
    parser.add_argument("--method", nargs="+", help="compare these methods only")
    args = parser.parse_args(argv)
    given = {name: getattr(args, name) for name in SOURCES if getattr(args, name) is not None}
    if not given:
        parser.error(f"name at least one checkout: {', '.join(f'--{name} DIR' for name in SOURCES)}")
    torch.set_num_threads(1)
    results, failed = [], 0
    for name, path in given.items():
        module = SOURCES[name]
        cases = [case for case in module.cases() if not args.method or case.method in args.method]
        try:
            checkout = Checkout(name, path, module.TRIED)
        except Unavailable as error:
            print(error)
            failed += 1
            continue
        for case in cases:
            try:
                results.append(compare(case, checkout))
            except (OutOfStep, Unavailable) as error:
                print(f"{case.method}: {error}")
                failed += 1
            else:
                print(line(results[-1]), flush=True)
    return 0 if not failed and all(result.as_expected for result in results) else 1


def line(result: Comparison) -> str:
    case = result.case
    what = f"{case.method} / {case.source}"
    cohort = f"{case.setting.cohort or len(case.setting.sizes)} of {len(case.setting.sizes)}"
    verdict = "agrees" if result.agrees else "differs"
    expected = "" if result.as_expected else "  UNEXPECTED"
    return f"{what:<28} {cohort:<7} {verdict:<8} {result.difference:8.1e} of {result.moved:.2g} {case.variant}{expected} ({result.where})"


if __name__ == "__main__":
    sys.exit(main())
