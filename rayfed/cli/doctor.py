"""`rayfed doctor`: look at this machine or cluster, and say what is wrong and what to do about it."""

import argparse
import itertools

from rayfed.cli.check import checklist_line

_DESCRIPTION = """\
Look at versions, GPUs, folders and shared memory, and start Ray or join the running cluster. Each problem is followed
by a remedy. The exit code is 1 if there is a problem.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = _DESCRIPTION
    parser.add_argument(
        "--no-ray", action="store_true", help="neither start Ray nor join a cluster, which takes seconds"
    )


def execute(options: argparse.Namespace) -> int:
    from rayfed.distributed.doctor import ray_checks
    from rayfed.experiments.machine_checks import machine_checks  # imports torch

    problems = 0
    checks = machine_checks()
    if not options.no_ray:
        checks = itertools.chain(checks, ray_checks())
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
    found = "problems"
    if problems == 1:
        found = "problem"
    print(f"{problems} {found} found")
    return 1
