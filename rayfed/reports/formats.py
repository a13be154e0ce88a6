"""Tables of results as text for a terminal, in Markdown and in LaTeX."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from rich.cells import cell_len

from rayfed.core.terminal import BLANK, Column, format_table, widest
from rayfed.reports.tables import CHOSEN, Cell, ResultTable

LATEX_PACKAGES = "% needs \\usepackage{booktabs}"
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
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
}


def text_table(table: ResultTable, *, width: int) -> str:
    """Return `table` for a terminal, at most `width` characters wide if possible.

    Mean and sd are on one line if the width allows it, otherwise on two. Columns that still do not fit follow in
    further tables, which repeat the names of the rows.
    """
    labels = _label_columns(table)
    room = width - _total_width(labels)
    numbers = _number_columns(table, " ± ")
    if _total_width(numbers) > room:
        numbers = _number_columns(table, "\n± ")
    parts: list[list[Column]] = [[]]
    for column in numbers:
        if parts[-1] and _total_width([*parts[-1], column]) > room:
            parts.append([])
        parts[-1].append(column)
    texts = []
    for columns in parts:
        texts.append(format_table([*labels, *columns], width))
    return "\n\n".join(texts)


def _total_width(columns: Sequence[Column]) -> int:
    return sum(column.width for column in columns)


def _label_columns(table: ResultTable) -> list[Column]:
    """Return the columns with the names of the rows: an algorithm is named once, and then its hyperparameters."""
    names: list[str] = []
    previous = None
    for name in table.algorithms:
        if name == previous:
            names.append("")
        else:
            names.append(name)
        previous = name
    columns = [Column("algorithm", names, right=False)]
    if any(table.hyperparameters):
        cells = []
        for text, chosen in zip(table.hyperparameters, table.chosen, strict=True):
            pairs = re.split(r"(?<=,) ", text)
            mark = f" {CHOSEN}" * chosen
            cells.append(_filled(pairs, _HYPERPARAMETERS_WIDTH, " ") + mark)
        columns.append(Column("hyperparameters", cells, right=False))
    return columns


def _number_columns(table: ResultTable, between: str) -> list[Column]:
    columns = []
    for name, cells in table.cells(between).items():
        header = _wrapped_header(name, cells)
        columns.append(Column(header, _aligned(cells)))
    return columns


def _aligned(cells: Sequence[str]) -> list[str]:
    """Return `cells`, padded on the right to the width of the longest stars, so that their numbers are aligned."""
    stars = []
    for cell in cells:
        stars.append(len(cell) - len(cell.rstrip("*")))
    most = max(stars)
    padded = []
    for cell, count in zip(cells, stars, strict=True):
        padded.append(cell + BLANK * (most - count))
    return padded


def _wrapped_header(name: str, cells: Sequence[str]) -> str:
    """Return the header, wrapped after _ - / or a space if it is wider than its cells."""
    parts = re.split(r"(?<=[_\-/ ])", name)
    return _filled(parts, max(_HEADER_WIDTH, widest(cells)), "")


def _filled(parts: Sequence[str], width: int, between: str) -> str:
    """Return `parts`, joined by `between`, on lines at most `width` wide if possible."""
    lines = [parts[0]]
    for part in parts[1:]:
        longer = f"{lines[-1]}{between}{part}"
        if cell_len(longer.rstrip()) > width:
            lines.append(part)
        else:
            lines[-1] = longer
    return "\n".join(line.rstrip() for line in lines)


def markdown_table(table: ResultTable) -> str:
    """Return `table` in Markdown, as GitHub renders it; the best number of each column is bold."""
    return markdown_columns(_marked_up(table, _markdown_text, _markdown_cell, f" {CHOSEN}"))


def markdown_columns(columns: Mapping[str, Sequence[str]]) -> str:
    """Return columns of text by header as a table; the first is aligned left, the rest right."""
    rule = ["---", *["---:"] * (len(columns) - 1)]
    rows = zip(*columns.values(), strict=True)
    lines = []
    for cells in (columns, rule, *rows):
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _markdown_cell(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    text = replace(cell, stars="", published=None).text()
    if cell.rank == 1:
        text = f"**{text}**"
    text += _markdown_text(cell.stars)
    return " ".join(filter(None, [text, cell.beside()]))


def _markdown_text(text: str) -> str:
    return re.sub(r"([\\|*<\[])", r"\\\1", text)


def latex_table(table: ResultTable, caption: str, label: str, legend: str = "") -> str:
    r"""Return `table` in LaTeX with booktabs, with a caption, a label for `\ref` and a legend below.

    The best number of each column is bold, the second underlined, among the rows that validation chose.
    """
    columns = _marked_up(table, latex_text, _latex_cell, r"$^{\dagger}$")
    reference = re.sub(r"[^A-Za-z0-9]+", "-", label).strip("-")
    alignment = "l" + "r" * (len(columns) - 1)
    lines = [r"\begin{table}", r"  \centering"]
    for command in _narrower(len(columns)):
        lines.append(f"  {command}")
    heading = " & ".join(columns)
    lines += [
        f"  \\caption{{{latex_text(caption)}}}",
        f"  \\label{{tab:{reference}}}",
        f"  \\begin{{tabular}}{{{alignment}}}",
        r"    \toprule",
        f"    {heading} \\\\",
        r"    \midrule",
    ]
    for cells in zip(*columns.values(), strict=True):
        lines.append(f"    {' & '.join(cells)} \\\\")
    lines += [r"    \bottomrule", r"  \end{tabular}"]
    if legend:
        lines.append(f"  \\par\\smallskip\\parbox{{\\linewidth}}{{\\footnotesize {latex_text(legend)}}}")
    lines.append(r"\end{table}")
    return "\n".join(lines)


def _narrower(columns: int) -> list[str]:
    """Return commands that make a table with many columns fit a page."""
    if columns <= 6:
        return []
    if columns <= 8:
        return [r"\small", r"\setlength{\tabcolsep}{4pt}"]
    return [r"\scriptsize", r"\setlength{\tabcolsep}{3pt}"]


def latex_text(text: str) -> str:
    """Return plain text as LaTeX code; a hyphen before a number is a minus sign."""
    text = re.sub(r"(?<![\w.])-(?=\d)", "−", text)
    return "".join(_LATEX_SPECIAL.get(letter, letter) for letter in text)


def _latex_cell(cell: Cell | None) -> str:
    if cell is None:
        return "--"
    between = r" $\pm$ "
    text = replace(cell, stars="", published=None).text(between)
    if cell.rank == 1:
        text = f"\\textbf{{{text}}}"
    if cell.rank == 2:
        text = f"\\underline{{{text}}}"
    if cell.stars:
        text += f"$^{{{cell.stars}}}$"
    return " ".join(filter(None, [text, cell.beside(between)]))


def _marked_up(
    table: ResultTable, escape: Callable[[str], str], show: Callable[[Cell | None], str], mark: str
) -> dict[str, list[str]]:
    """Return the labels of the rows, with `mark` after chosen ones, and the columns of numbers."""
    labels = []
    for label, chosen in zip(table.labels, table.chosen, strict=True):
        labels.append(escape(label) + mark * chosen)
    columns = {"": labels}
    for column in table.columns:
        columns[escape(column.header)] = [show(cell) for cell in column.cells]
    return table.with_seeds(columns)
