"""How comparisons are printed: a line each, and tables for `docs/fidelity/lockstep.md`."""

from collections.abc import Sequence

from references.harness import Case, Comparison


def line(result: Comparison) -> str:
    """Return the outcome in one line."""
    case = result.case
    size = f"{result.difference:.1e} where weights moved by up to {result.moved:.2g}"
    variant = f" [{case.variant}]" if case.variant else ""
    unexpected = "" if result.as_expected else "; NOT EXPECTED"
    return (
        f"{title(case):<24} {participants(case):<7} {verdict(result)} {size}{variant} (at {result.where}{unexpected})"
    )


def title(case: Case) -> str:
    """Return the method and the other project: "fedavg / pfllib"."""
    return f"{case.method} / {case.source}"


def participants(case: Case) -> str:
    """Return who takes part in a round: "4 of 4"."""
    clients = len(case.setting.sizes)
    return f"{case.setting.cohort or clients} of {clients}"


def verdict(result: Comparison) -> str:
    return "agrees " if result.agrees else "differs"


def reasons(results: Sequence[Comparison]) -> list[str]:
    """Return why methods differ that are known to, one entry per reason, with the methods and projects it concerns."""
    titles: dict[str, dict[str, None]] = {}
    for result in results:
        if result.case.differs:
            titles.setdefault(result.case.differs, {})[title(result.case)] = None
    return [f"{', '.join(names)}: {text}" for text, names in titles.items()]


def markdown(results: Sequence[Comparison], names: dict[str, str]) -> str:
    """Return a section per project with a row per method and variant, in the order of `results`.

    Args:
        names: What to call each project; those of one name share a section.
    """
    sections: dict[str, dict[tuple[str, str], dict[bool, Comparison]]] = {}
    for result in results:
        case = result.case
        rows = sections.setdefault(names[case.source], {})
        rows.setdefault((case.method, case.variant), {})[case.setting.is_partial] = result
    return "\n\n".join(_section(name, rows) for name, rows in sections.items())


def _section(name: str, rows: dict[tuple[str, str], dict[bool, Comparison]]) -> str:
    lines = [f"### {name}", "", "| method | variant | all clients | 2 of 4 | moved |", "|---|---|---|---|---|"]
    for (method, variant), row in rows.items():
        every, some = (_difference(row[key]) if key in row else "" for key in (False, True))
        moved = max(result.moved for result in row.values())
        lines.append(f"| `{method}` | {variant} | {every} | {some} | {moved:.2g} |")
    return "\n".join(lines)


def _difference(result: Comparison) -> str:
    return f"{result.difference:.0e}" if result.agrees else f"**{result.difference:.0e}**"
