"""Judge every claim of the tables' YAML files by what is stored in `measured`: docs/fidelity/index.md and claims.csv.

    python benchmarks/papers/index.py            # write the table of the page, and the list of all claims
    python benchmarks/papers/index.py --print    # print the table

A claim is judged by the values of each seed; else by printed means, where these decide; else its verdict is the printed
one. What has more seeds comes first. Measurements of an older configuration count, marked, where there are no others.
"""

import argparse
import csv
import io
import itertools
import re
import sys
from collections.abc import Sequence
from typing import NamedTuple

from _stored import configurations, printed_means, printed_verdicts, stored
from _tables import HOME, Claim, PaperTable, names, read_table
from _verdicts import NOT_MEASURED, ONE_SEED, Verdict, by_column, verdict, verdict_of_means

PAGE = HOME.parents[1] / "docs" / "fidelity" / "index.md"
LIST = PAGE.with_name("claims.csv")
BEGIN, END = "<!-- made by benchmarks/papers/index.py -->", "<!-- end -->"
PAPERS = {
    "feddebias": "000-feddebias.md",
    "adcol": "001-adcol.md",
    "augmentation": "002-augmentation.md",
    "fraug": "003-fraug.md",
    "dbe": "004-dbe.md",
}
AGAINST = {"holds for some seeds", "does not hold", ONE_SEED[False]}
HEAD = [
    "table",
    "holds",
    "within one sd",
    "one seed, as claimed",
    "not measured",
    "older",
    "transcribed",
    "does not hold",
]


class Judged(NamedTuple):
    """A claim and its verdict, by "values" or "means", or that is "transcribed" from the page; "": by none."""

    claim: Claim
    verdict: Verdict
    source: str = ""
    older: bool = False


def judged(table: PaperTable, scale: str) -> list[Judged]:
    """Return every claim of the table, judged by what is stored of its form `scale`."""
    hashes = configurations(table, scale)
    values = stored(table, scale, hashes)
    means, copies = printed_means(table, scale, hashes), printed_verdicts(table, scale, hashes)
    claims = []
    for claim in table.claims:
        found: list[Judged] = []
        for current in (True, False):
            more, less = (means[current].get((row, claim.column)) for row in (claim.more, claim.less))
            copy = copies[current].get(claim.text, NOT_MEASURED)
            of_means = verdict_of_means(claim, more, less) if more and less else NOT_MEASURED
            if of_means.seeds == copy.seeds:
                of_means = of_means._replace(gap=copy.gap)  # with the sd of the differences
            of_values = verdict(claim, values[values["current"] == current])
            sources = {"values": of_values, "means": of_means, "transcribed": copy}
            found += [Judged(claim, answer, source, not current) for source, answer in sources.items() if answer.seeds]
        unmeasured = Judged(claim, NOT_MEASURED)
        claims.append(max(found, key=lambda one: (not one.older, one.verdict.seeds), default=unmeasured))
    return claims


def judged_tables() -> list[tuple[PaperTable, str, list[Judged]]]:
    """Return each table, a form and its judged claims: the small form, and the full one if there is a verdict on it."""
    tables = []
    for name in sorted(names(), key=lambda name: (list(PAPERS).index(name.split("_")[0]), name)):
        table = read_table(name)
        forms = [scale for scale in ("small", "full") if not isinstance(table.content[scale], str)]
        for scale in forms:
            claims = judged(table, scale)
            if scale == forms[0] or any(one.source for one in claims):
                tables.append((table, scale, claims))
    return tables


def counts(claims: Sequence[Judged]) -> list[str | int]:
    """Return how many claims have each verdict, and how many are of an older configuration and transcribed."""
    answers = [one.verdict.answer for one in claims]
    holds, within, undecided = (answers.count(answer) for answer in ("holds", "within one sd", "not measured"))
    seeds = [answer for answer in answers if answer in ONE_SEED.values()]
    one_seed = f"{seeds.count(ONE_SEED[True])} of {len(seeds)}" if seeds else ""
    older, transcribed = sum(one.older for one in claims), sum(one.source == "transcribed" for one in claims)
    return [holds, within, one_seed, undecided, older, transcribed]


def against(claims: Sequence[Judged]) -> str:
    """Return the claims that do not hold by column, then those that one seed contradicts."""
    parts = []
    for only_seed in (False, True):
        answers = {ONE_SEED[False]} if only_seed else AGAINST - {ONE_SEED[False]}
        texts = by_column((one.claim, one.verdict.gap) for one in claims if one.verdict.answer in answers)
        if texts:
            parts.append("one seed: " * only_seed + "; ".join(texts))
    return "; ".join(parts)


def markdown(cells: Sequence[str | int]) -> str:
    """Return a line of a table in Markdown; 0 is left out."""
    return "|" + "".join(f" {cell} |" if cell else "|" for cell in cells)


def link(table: PaperTable, scale: str) -> str:
    """Return the table's name with a link to its section, if its page has one of the same title."""
    page = PAPERS[table.name.split("_")[0]]
    name = f"`{table.name}`{', full' * (scale == 'full' and not isinstance(table.content['small'], str))}"
    if f"### {table.content['title']}\n" not in (PAGE.parent / page).read_text(encoding="utf-8"):
        return name
    return f"[{name}]({page}#{anchor(table.content['title'])})"


def anchor(title: str) -> str:
    """Return the anchor that GitHub and MkDocs give to a heading."""
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", title.lower()))


def table_of_claims(tables: Sequence[tuple[PaperTable, str, list[Judged]]]) -> str:
    """Return the table in Markdown: a line per table and form with a verdict, one for other tables, and one for all."""
    lines, others = [markdown(HEAD), "|" + "---|" * len(HEAD)], []
    for table, scale, claims in tables:
        if any(one.source for one in claims):
            lines.append(markdown([link(table, scale), *counts(claims), against(claims)]))
        else:
            others.append(claims)
    lines.append(markdown([f"{len(others)} other tables", *counts(list(itertools.chain(*others))), ""]))
    every = [one for *_, claims in tables for one in claims]
    return "\n".join([*lines, markdown(["all", *counts(every), ""])])


def list_of_claims(tables: Sequence[tuple[PaperTable, str, list[Judged]]]) -> str:
    """Return all claims as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["table", "form", "claim", "answer", "difference", "seeds", "judged by", "configuration"])
    for table, scale, claims in tables:
        for one in claims:
            configuration = ("older" if one.older else "present") if one.source else ""
            measured = [*one.verdict, one.source, configuration]
            writer.writerow([table.name, scale, one.claim.text, *measured])
    return text.getvalue()


def with_table(text: str, table: str) -> str:
    """Return the page's text with `table` in the place between the two marks."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.partition(END)[2]}"


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--print", action="store_true", help="print the table instead of writing the files")
    args = parser.parse_args()
    tables = judged_tables()
    if args.print:
        print(table_of_claims(tables))
    else:
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), table_of_claims(tables)), encoding="utf-8")
        LIST.write_text(list_of_claims(tables), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
