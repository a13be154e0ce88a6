"""Make the table of docs/fidelity/index.md from the tables' YAML files and the stored values.

    python benchmarks/papers/index.py            # write it
    python benchmarks/papers/index.py --print    # print it, and what is left out

Every claim of every table with a small form is in it: a claim without values is not measured.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from _stored import load, printed
from _tables import HOME, Claim, PaperTable, names, read_table
from run import ONE_SEED, verdict

PAGE = HOME.parents[1] / "docs" / "fidelity" / "index.md"
BEGIN, END = "<!-- made by benchmarks/papers/index.py -->", "<!-- end -->"
PAPERS = {
    "feddebias": "000-feddebias.md",
    "adcol": "001-adcol.md",
    "augmentation": "002-augmentation.md",
    "fraug": "003-fraug.md",
    "dbe": "004-dbe.md",
}
ANSWERS = ("holds", "within one sd", "holds for some seeds", "does not hold", "not measured")


class Judged(NamedTuple):
    """A claim, the answer to it and the difference, and the number of seeds behind them."""

    claim: Claim
    answer: str
    gap: str
    seeds: int


def judged(table: PaperTable) -> tuple[list[Judged], list[str]]:
    """Return every claim with its answer from the small form, and a line on each stored value that is left out."""
    values, left_out = load(table, "small")
    before, also_left_out = printed(table, "small")
    verdicts = []
    for claim in table.claims:
        answer, gap = verdict(claim, values)
        if answer != "not measured":
            both = values[(values["column"] == claim.column) & values["row"].isin([claim.more, claim.less])]
            seeds = int((both.groupby("seed")["row"].nunique() == 2).sum())
        else:
            answer, gap, seeds = before.get(claim.text, (answer, gap, 0))
        verdicts.append(Judged(claim, answer, gap, seeds))
    return verdicts, left_out + also_left_out


def line(table: PaperTable, verdicts: Sequence[Judged]) -> str:
    """Return the table's line: how many claims hold, and each that does not, with what one seed shows apart."""
    several = [v for v in verdicts if v.seeds > 1]
    one = [v for v in verdicts if v.seeds == 1]
    as_claimed = [v for v in one if v.answer in ("holds", ONE_SEED[True])]
    counts = [len([v for v in several if v.answer == answer]) for answer in ANSWERS[:2]]
    seed = f"{len(as_claimed)} of {len(one)}" if one else ""
    missing = sum(v.answer == "not measured" for v in verdicts)
    against = [v for v in several if v.answer not in ANSWERS[:2]]
    texts = [f"{v.claim.text} ({v.gap})" for v in against]
    texts += [f"one seed: {v.claim.text} ({v.gap})" for v in one if v not in as_claimed]
    cells = [link(table), *(str(count or "") for count in counts), seed, str(missing or ""), "; ".join(texts)]
    return f"| {' | '.join(cells)} |".replace("  ", " ")


def link(table: PaperTable) -> str:
    """Return the table's name with a link to its section, if its page has one of the same title."""
    page = PAPERS[table.name.split("_")[0]]
    heading = f"### {table.content['title']}\n"
    if heading not in (PAGE.parent / page).read_text(encoding="utf-8"):
        return f"`{table.name}`"
    return f"[`{table.name}`]({page}#{anchor(table.content['title'])})"


def anchor(title: str) -> str:
    """Return the anchor that GitHub and MkDocs give to a heading."""
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", title.lower()))


def table_of_claims() -> tuple[str, list[str]]:
    """Return the Markdown table, and what was left out."""
    head = ["table", "holds", "within one sd", "one seed, as claimed", "not measured", "does not hold"]
    lines, left_out = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)], []
    for name in sorted(names(), key=lambda name: (list(PAPERS).index(name.split("_")[0]), name)):
        table = read_table(name)
        if isinstance(table.content["small"], str):
            continue
        verdicts, out = judged(table)
        left_out += out
        lines.append(line(table, verdicts))
    return "\n".join(lines), left_out


def with_table(text: str, table: str) -> str:
    """Return the page's text with `table` in the place between the two marks."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.partition(END)[2]}"


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--print", action="store_true", help="print the table instead of writing it to the page")
    args = parser.parse_args()
    table, left_out = table_of_claims()
    print("\n".join(f"left out: {text}" for text in left_out), file=sys.stderr)
    if args.print:
        print(table)
    else:
        Path(PAGE).write_text(with_table(PAGE.read_text(encoding="utf-8"), table), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
