"""`rayfed doctor`: look at this machine or cluster, and say what is wrong and what to do about it."""

import argparse
import itertools
from collections.abc import Iterable
from typing import Any

from rayfed.cli.check import checklist_line
from rayfed.cli.json_output import Document, add_json, write_json
from rayfed.core.words import counted

_DESCRIPTION = """\
Look at versions, GPUs, folders and shared memory, and start Ray or join the running cluster. Each problem is followed
by a remedy. The exit code is 1 if there is a problem.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = _DESCRIPTION
    add_json(parser)
    parser.add_argument(
        "--no-ray", action="store_true", help="neither start Ray nor join a cluster, which takes seconds"
    )


def execute(options: argparse.Namespace) -> int:
    from rayfed.distributed.doctor import ray_checks
    from rayfed.experiments.machine_checks import machine_checks  # imports torch

    checks = machine_checks()
    if not options.no_ray:
        checks = itertools.chain(checks, ray_checks())
    if options.json:
        return write_json("doctor", lambda: _document(checks))
    problems = 0
    for check in checks:
        mark = "ok"
        if check.remedy:
            mark = "PROBLEM"
        print(checklist_line(mark, check.subject, check.found), flush=True)
        if check.remedy:
            print(checklist_line("", "remedy:", check.remedy))
            problems += 1
    if problems == 0:
        print("no problem found")
        return 0
    print(f"{counted(problems, 'problem')} found")
    return 1


def _document(checks: Iterable[Any]) -> Document:
    found = [check._asdict() for check in checks]
    problems = sum(bool(check["remedy"]) for check in found)
    return int(problems > 0), {"problems": problems, "checks": found}
