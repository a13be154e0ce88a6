"""Tables in LaTeX with booktabs: the best number of each column is bold, the second underlined."""

import re
from collections.abc import Mapping, Sequence

from rayfed.reports.result_table import Cell, ResultTable

PACKAGES = "% needs \\usepackage{booktabs}"
_SPECIAL = {
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


def latex_table(table: ResultTable, caption: str, label: str) -> str:
    """Return `table` as a floating table with a caption; `label` is that of `\\ref`."""
    columns = {"": [latex_text(label) for label in table.labels]}
    if any(table.chosen):
        marks = [r"$^{\dagger}$" if chosen else "" for chosen in table.chosen]
        columns[""] = [text + mark for text, mark in zip(columns[""], marks, strict=True)]
    columns |= {latex_text(column.header): [_cell(cell) for cell in column.cells] for column in table.columns}
    if table.same_seeds is None:
        columns["seeds"] = list(map(str, table.seeds))
    return latex_columns(columns, caption, label)


def latex_columns(columns: Mapping[str, Sequence[str]], caption: str, label: str) -> str:
    """Return columns of LaTeX code by header, of which the first is aligned left and the others right."""
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
    return "".join(_SPECIAL.get(letter, letter) for letter in text)


def _cell(cell: Cell | None) -> str:
    if cell is None:
        return "--"
    number = f"{cell.number} $\\pm$ {cell.spread}" if cell.spread else cell.number
    styles = {1: f"\\textbf{{{number}}}", 2: f"\\underline{{{number}}}"}
    return styles.get(cell.rank, number) + (f"$^{{{cell.stars}}}$" if cell.stars else "")
