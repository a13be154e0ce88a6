"""`rayfed check`: check that an algorithm keeps the contract with the engine."""

import argparse
import textwrap

from rayfed.cli.arguments import add_values, read_values
from rayfed.cli.help import VALUES, config_keys
from rayfed.cli.json_output import Document, add_json, write_json
from rayfed.core.machine import importing
from rayfed.core.words import counted
from rayfed.experiments.config import Config

_DESCRIPTION = """\
Check that an algorithm keeps the contract with the engine: hooks that do not modify their inputs, equal bits from
equal seeds and after a resume, several clients at once, part of the clients, every evaluation point, clients that
join late, and other tasks: pixels, next words, two inputs, a half frozen model. A few rounds with a few examples of the
configured data run in this process, and with placement.hosts=2 on Ray as well. Nothing is kept. The exit code is 1 if
the contract is broken.

    rayfed check algorithm.name=mine:Mine algorithm.tau=0.5 model.name=cnn
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = f"{parser.prog} [FILE.yaml ...] [KEY=VALUE ...]"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"{VALUES}\n{config_keys()}"
    parser.description = _DESCRIPTION
    add_values(parser, "FILE.yaml", "YAML files and single values of the configuration, as for `rayfed run`")
    add_json(parser)


def execute(options: argparse.Namespace) -> int:
    values = read_values(options.values)
    with importing():
        config = Config.read(*values)  # imports torch
        from rayfed.api import iter_findings

    if options.json:
        return write_json("check", lambda: _document(config))
    broken = 0
    for finding in iter_findings(config):
        mark = "BROKEN"
        if finding.kept:
            mark = "ok"
        print(checklist_line(mark, finding.subject, finding.found), flush=True)
        broken += not finding.kept
    if broken == 0:
        print("the contract is kept")
        return 0
    print(f"the contract is broken in {counted(broken, 'part')}")
    return 1


def _document(config: Config) -> Document:
    from rayfed.api import iter_findings

    found = list(map(vars, iter_findings(config)))
    is_kept = all(finding["kept"] for finding in found)
    return int(not is_kept), {"kept": is_kept, "findings": found}


def checklist_line(mark: str, subject: str, found: str) -> str:
    """Return an entry of a checklist, as `rayfed doctor` prints it, too: what was checked, and what was found."""
    line = f"{mark:8} {subject:11} {found}"
    return textwrap.fill(line, 118, subsequent_indent=" " * 21, break_on_hyphens=False)
