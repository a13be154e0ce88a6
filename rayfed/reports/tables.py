"""Tables of results as text, Markdown and LaTeX: a row per method, columns for domains, mean and worst client."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

import pandas as pd
from rich.cells import cell_len

from rayfed.core.records import is_fraction
from rayfed.core.terminal import BLANK, Column, format_table, widest
from rayfed.reports.selection import DOMAIN, FEW_CLIENTS

CHOSEN = "†"
"""Marks hyperparameters that validation chose."""
LATEX_PACKAGES = "% needs \\usepackage{booktabs}"
_LAST = (("mean", "AVG"), ("best10", "best 10 %"), ("worst10", "worst 10 %"), ("worst", "worst"))
_SEEDS = "seeds"
_HYPERPARAMETERS_WIDTH = 30  # longer hyperparameters are wrapped
_HEADER_WIDTH = 12  # longer headers are wrapped, unless their cells are as wide
_LATEX_SPECIAL = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "μ": r"$\mu$",
    "±": r"$\pm$",
    "−": r"$-$",
    "†": r"$\dagger$",
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
}


@dataclass(frozen=True)
class Cell:
    """Mean and standard deviation over seeds; accuracies are in percent.

    Attributes:
        sd: The standard deviation; None for a single seed.
        decimals: The number of decimals to show.
        rank: 1 for the best of a column, 2 for the second, 0 for the rest. Equal numbers have equal ranks.
        stars: Stars of significance.
        seeds: The number of seeds, which is below that of the row if no client held the domain at some seeds.
    """

    mean: float
    sd: float | None
    decimals: int
    rank: int = 0
    stars: str = ""
    seeds: int = field(default=0, compare=False)

    @property
    def number(self) -> str:
        return f"{self.mean:.{self.decimals}f}"

    @property
    def spread(self) -> str:
        """The standard deviation as text; empty if there is none."""
        return "" if self.sd is None else f"{self.sd:.{self.decimals}f}"

    def text(self, between: str = " ± ") -> str:
        return (f"{self.number}{between}{self.spread}" if self.spread else self.number) + self.stars


class ResultColumn(NamedTuple):
    """A column of numbers; None where a method has no value."""

    header: str
    cells: list[Cell | None]


@dataclass(frozen=True)
class ResultTable:
    """A table whose rows are methods with their hyperparameters.

    Attributes:
        algorithms: The name of the algorithm in each row.
        hyperparameters: What varies in each row, such as "mu=1"; empty strings if nothing varies.
        chosen: Whether validation chose the hyperparameters of a row among several.
        columns: The numbers.
        seeds: The number of seeds of each row's mean over clients.
        orders: The group of trials of each row (`order` in a summary).
        remarks: Sentences on columns that are left out, and on columns with fewer seeds.
    """

    algorithms: list[str]
    hyperparameters: list[str]
    chosen: list[bool]
    columns: list[ResultColumn]
    seeds: list[int]
    orders: list[int]
    remarks: list[str]

    @property
    def labels(self) -> list[str]:
        """The algorithm and its hyperparameters, one text per row."""
        return [" ".join(filter(None, pair)) for pair in zip(self.algorithms, self.hyperparameters, strict=True)]

    @property
    def same_seeds(self) -> int | None:
        """The number of seeds of every row; None if they differ."""
        return self.seeds[0] if len(set(self.seeds)) == 1 else None

    @property
    def answers_first(self) -> list[ResultColumn]:
        """The columns, with means, tenths and the worst client before the domains."""
        headers = [column.header for column in self.columns]
        if _LAST[0][1] not in headers:  # a single domain has no AVG beside it
            return self.columns
        return sorted(self.columns, key=lambda column: column.header not in dict(_LAST).values())

    def cells(self, between: str = " ± ") -> dict[str, list[str]]:
        """Return the columns of numbers as text by header, and that of the number of seeds if it differs."""
        return self.with_seeds(
            {column.header: [cell.text(between) if cell else "-" for cell in column.cells] for column in self.columns}
        )

    def with_seeds(self, columns: dict[str, list[str]]) -> dict[str, list[str]]:
        """Return `columns`, with the number of seeds if it differs between rows."""
        return columns if self.same_seeds else {**columns, _SEEDS: list(map(str, self.seeds))}


class Stars(NamedTuple):
    """Stars of significance.

    Attributes:
        best: The name of the method with which the others are compared.
        marks: The stars of methods by their `order`.
        p_values: The p-values of the t test after Holm's correction, by `order`.
    """

    best: str = ""
    marks: Mapping[int, str] = MappingProxyType({})
    p_values: Mapping[int, str] = MappingProxyType({})


def make_table(rows: pd.DataFrame, metric: str, stars: Stars | None = None) -> ResultTable:
    """Return a table of `rows`, which are rows of `Summary.rows` with the same experiment, metric, split and rule.

    The columns are the domains, unless there are more than `FEW_CLIENTS`, the mean over clients, the best and the worst
    tenth of many clients, and the worst client. The mean is left out if it repeats a single domain, and the worst
    client if it repeats another column. `stars` mark the column of means.
    """
    groups = {int(order): group.set_index("quantity") for order, group in rows.groupby("order")}
    first = [group.iloc[0] for group in groups.values()]
    counts = rows.groupby("algorithm")["order"].nunique()
    domains = sorted({name for name in rows["quantity"] if name.startswith(DOMAIN)}, key=_number_key)
    remarks = []
    if len(domains) > FEW_CLIENTS:
        remarks = [f"The {len(domains)} domains have no columns here; --format csv has them."]
        domains = []
    better = bool(rows["higher_is_better"].iloc[0])
    last = [(name, header) for name, header in _LAST if (rows["quantity"] == name).any()]
    columns = {
        name: ResultColumn(header, _ranked([_cell(group, name, metric) for group in groups.values()], better))
        for name, header in [*((name, _domain_header(name)) for name in domains), *last]
    }
    remarks += _remove_repeated(columns, domains)
    seeds = [int(group.loc["mean", "seeds"]) for group in groups.values()]
    remarks += _fewer_seeds(columns.values(), seeds)
    if stars:
        shown = "mean" if "mean" in columns else domains[0]
        pairs = zip(groups, columns[shown].cells, strict=True)
        cells = [replace(cell, stars=stars.marks.get(order, "")) if cell else None for order, cell in pairs]
        columns[shown] = columns[shown]._replace(cells=cells)
    return ResultTable(
        algorithms=[str(row["algorithm"]) for row in first],
        hyperparameters=[str(row["hyperparameters"]) for row in first],
        chosen=[bool(row["chosen"] and counts[row["algorithm"]] > 1) for row in first],
        columns=list(columns.values()),
        seeds=seeds,
        orders=list(groups),
        remarks=remarks,
    )


def _remove_repeated(columns: dict[str, ResultColumn], domains: Sequence[str]) -> list[str]:
    """Remove the columns that repeat another column, and return a sentence on each that a reader would look for."""
    remarks = []
    for name, header in (("worst", "worst"), ("mean", "AVG")):
        if name == "mean" and len(domains) != 1:
            continue  # the mean of several domains equals one of them only by coincidence
        others = [columns[o] for o in columns if o.startswith(DOMAIN) or (name == "worst" and o != name)]
        if same := next((column for column in others if column.cells == columns[name].cells), None):
            del columns[name]
            if len(domains) > 1 or "worst10" in columns:
                remarks.append(f"{header}: the same as {same.header} in every row.")
    return remarks


def _domain_header(quantity: str) -> str:
    """Return the name of a domain; "domain X" where X is a header that every table has."""
    domain = quantity.removeprefix(DOMAIN)
    return f"domain {domain}" if domain in (_SEEDS, *dict(_LAST).values()) else domain


def _cell(group: pd.DataFrame, quantity: str, metric: str) -> Cell | None:
    if quantity not in group.index:
        return None
    mean, sd = float(group.loc[quantity, "mean"]), float(group.loc[quantity, "sd"])
    scale, decimals = (100, 2) if is_fraction(metric) else (1, _decimals(mean))
    return Cell(scale * mean, None if math.isnan(sd) else scale * sd, decimals, seeds=int(group.loc[quantity, "seeds"]))


def _fewer_seeds(columns: Iterable[ResultColumn], seeds: Sequence[int]) -> list[str]:
    """Return a sentence on the columns whose cells have fewer seeds than their rows."""
    words = []
    for column in columns:
        cells = [(cell.seeds, of_row) for cell, of_row in zip(column.cells, seeds, strict=True) if cell]
        if any(of_cell < of_row for of_cell, of_row in cells):
            least, most = min(of_cell for of_cell, _ in cells), max(of_cell for of_cell, _ in cells)
            words.append(f"{column.header} {least if least == most else f'{least} to {most}'}")
    return [f"Columns with values of fewer seeds: {', '.join(words)}."] if words else []


def _ranked(cells: Sequence[Cell | None], higher_is_better: bool) -> list[Cell | None]:
    """Return `cells` with the ranks of the best and the second best, by the numbers as shown."""
    shown = sorted({float(cell.number) for cell in cells if cell}, reverse=higher_is_better)
    if len(shown) < 2:
        return list(cells)
    ranks = {number: rank for rank, number in enumerate(shown[:2], start=1)}
    return [replace(cell, rank=ranks.get(float(cell.number), 0)) if cell else None for cell in cells]


def _decimals(mean: float) -> int:
    """Return the number of decimals that gives `mean` four significant digits."""
    if not math.isfinite(mean) or mean == 0:
        return 4
    return min(6, max(0, 3 - math.floor(math.log10(abs(mean)))))


def _number_key(name: str) -> list[tuple[bool, int, str]]:
    """Return a key that sorts client_2 before client_10."""
    return [(not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", name)]


def text_table(table: ResultTable, *, width: int) -> str:
    """Return `table` for a terminal, at most `width` characters wide if possible.

    Mean and sd are on one line if the width allows it, otherwise on two. Columns that still do not fit follow in
    further tables, which repeat the names of the rows.
    """
    names = table.algorithms
    names = [name if index == 0 or names[index - 1] != name else "" for index, name in enumerate(names)]
    labels = [Column("algorithm", names, right=False)]
    if any(table.hyperparameters):
        texts = [_filled(re.split(r"(?<=,) ", text), _HYPERPARAMETERS_WIDTH, " ") for text in table.hyperparameters]
        cells = [text + f" {CHOSEN}" * chosen for text, chosen in zip(texts, table.chosen, strict=True)]
        labels.append(Column("hyperparameters", cells, right=False))
    room = width - sum(column.width for column in labels)
    for between in (" ± ", "\n± "):
        numbers = [
            Column(_wrapped_header(name, cells), _aligned(cells)) for name, cells in table.cells(between).items()
        ]
        if sum(column.width for column in numbers) <= room:
            break
    tables: list[list[Column]] = [[]]
    for column in numbers:
        if tables[-1] and sum(other.width for other in [*tables[-1], column]) > room:
            tables.append([])
        tables[-1].append(column)
    return "\n\n".join(format_table([*labels, *columns], width) for columns in tables)


def _aligned(cells: Sequence[str]) -> list[str]:
    """Return `cells`, padded on the right to the width of the longest stars, so that their numbers are aligned."""
    numbers = [cell.rstrip("*") for cell in cells]
    stars = max(len(cell) - len(number) for cell, number in zip(cells, numbers, strict=True))
    return [cell + BLANK * (stars - len(cell) + len(number)) for cell, number in zip(cells, numbers, strict=True)]


def _wrapped_header(name: str, cells: Sequence[str]) -> str:
    """Return the header, wrapped after _ - / or a space if it is wider than its cells."""
    return _filled(re.split(r"(?<=[_\-/ ])", name), max(_HEADER_WIDTH, widest(cells)), "")


def _filled(parts: Sequence[str], width: int, between: str) -> str:
    """Return `parts`, joined by `between`, on lines at most `width` wide if possible."""
    lines = [parts[0]]
    for part in parts[1:]:
        if cell_len(f"{lines[-1]}{between}{part}".rstrip()) > width:
            lines.append(part)
        else:
            lines[-1] += f"{between}{part}"
    return "\n".join(line.rstrip() for line in lines)


def markdown_table(table: ResultTable) -> str:
    """Return `table` in Markdown, as GitHub renders it; the best number of each column is bold."""
    return markdown_columns(_marked_up(table, _markdown_text, _markdown_cell, f" {CHOSEN}"))


def markdown_columns(columns: Mapping[str, Sequence[str]]) -> str:
    """Return columns of text by header as a table; the first is aligned left, the rest right."""
    lines = [list(columns), ["---", *["---:"] * (len(columns) - 1)], *zip(*columns.values(), strict=True)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _markdown_cell(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    text = replace(cell, stars="").text()
    return (f"**{text}**" if cell.rank == 1 else text) + _markdown_text(cell.stars)


def _markdown_text(text: str) -> str:
    return re.sub(r"([\\|*<\[])", r"\\\1", text)


def latex_table(table: ResultTable, caption: str, label: str) -> str:
    r"""Return `table` in LaTeX with booktabs, with a caption and a label for `\ref`.

    The best number of each column is bold, the second underlined.
    """
    columns = _marked_up(table, latex_text, _latex_cell, r"$^{\dagger}$")
    rows = [" & ".join(cells) + r" \\" for cells in zip(*columns.values(), strict=True)]
    lines = [
        r"\begin{table}",
        r"  \centering",
        *(f"  {line}" for line in _narrower(len(columns))),
        f"  \\caption{{{latex_text(caption)}}}",
        f"  \\label{{tab:{re.sub(r'[^A-Za-z0-9]+', '-', label).strip('-')}}}",
        f"  \\begin{{tabular}}{{l{'r' * (len(columns) - 1)}}}",
        r"    \toprule",
        f"    {' & '.join(columns)} \\\\",
        r"    \midrule",
        *(f"    {row}" for row in rows),
        r"    \bottomrule",
        r"  \end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines)


def _narrower(columns: int) -> list[str]:
    """Return commands that make a table with many columns fit a page."""
    if columns <= 6:
        return []
    size, gap = (r"\small", 4) if columns <= 8 else (r"\scriptsize", 3)
    return [size, f"\\setlength{{\\tabcolsep}}{{{gap}pt}}"]


def latex_text(text: str) -> str:
    """Return plain text as LaTeX code; a hyphen before a number is a minus sign."""
    text = re.sub(r"(?<![\w.])-(?=\d)", "−", text)
    return "".join(_LATEX_SPECIAL.get(letter, letter) for letter in text)


def _latex_cell(cell: Cell | None) -> str:
    if cell is None:
        return "--"
    number = replace(cell, stars="").text(r" $\pm$ ")
    styles = {1: f"\\textbf{{{number}}}", 2: f"\\underline{{{number}}}"}
    return styles.get(cell.rank, number) + (f"$^{{{cell.stars}}}$" if cell.stars else "")


def _marked_up(
    table: ResultTable, escape: Callable[[str], str], show: Callable[[Cell | None], str], mark: str
) -> dict[str, list[str]]:
    """Return the labels of the rows, with `mark` after chosen ones, and the columns of numbers."""
    labels = [escape(label) + mark * chosen for label, chosen in zip(table.labels, table.chosen, strict=True)]
    numbers = {escape(column.header): [show(cell) for cell in column.cells] for column in table.columns}
    return table.with_seeds({"": labels, **numbers})
