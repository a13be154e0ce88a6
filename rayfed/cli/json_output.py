"""`--json`: one JSON document on stdout, and everything else on stderr, for programs that read the outcome."""

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

Document = tuple[int, dict[str, Any]]
"""The exit code, and what to write."""


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option `--json`."""
    parser.add_argument(
        "--json", action="store_true", help="write one JSON document to stdout, and everything else to stderr"
    )


def write_json(command: str, document: Callable[[], Document]) -> int:
    """Write what a command did as JSON, and return the exit code."""
    with contextlib.redirect_stdout(sys.stderr):
        code, content = document()
    print(json_text({"command": command, "exit_code": code, **content}))
    return code


def json_text(content: Any) -> str:
    """Return a value as strict JSON: numbers that are not finite are null."""
    return json.dumps(_plain(content), ensure_ascii=False, indent=1, default=str)


def table_rows(results: str, experiment: str | None) -> list[dict[str, Any]]:
    """Return the values that `rayfed report --format csv` prints; none if nothing was scored."""
    from rayfed.core.errors import UsageError
    from rayfed.reports.render import reported_values

    try:
        rows: list[dict[str, Any]] = reported_values(results, experiment).to_dict("records")
    except UsageError:  # nothing was scored
        return []
    return rows


def trial_rows(results: str, experiment: str | None) -> list[dict[str, Any]]:
    """Return the rows of the table `trials`, without values that are null."""
    from rayfed.reports.read import read

    rows = []
    for row in read(results, experiment).trials.to_dict("records"):
        plain = _plain(row)
        rows.append({key: value for key, value in plain.items() if value is not None})
    return rows


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "item") and not isinstance(value, str):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if type(value).__name__ in ("NaTType", "NAType"):
        return None
    return value
