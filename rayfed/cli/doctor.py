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
    for check in itertools.chain(machine_checks(), [] if options.no_ray else ray_checks()):
        mark = "PROBLEM" if check.remedy else "ok"
        print(checklist_line(mark, check.subject, check.found), flush=True)
        if check.remedy:
            print(checklist_line("", "remedy:", check.remedy))
            problems += 1
    print(f"{problems} problem{'s' * (problems != 1)} found" if problems else "no problem found")
    return 1 if problems else 0
