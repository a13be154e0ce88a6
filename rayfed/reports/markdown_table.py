"""Tables in Markdown, as GitHub renders them: the best number of each column is bold."""

from collections.abc import Mapping, Sequence

from rayfed.reports.result_table import CHOSEN, Cell, ResultTable


def markdown_table(table: ResultTable) -> str:
    """Return `table` in Markdown."""
    marks = [f" {CHOSEN}" if chosen else "" for chosen in table.chosen]
    columns = {"": [_escaped(label) + mark for label, mark in zip(table.labels, marks, strict=True)]}
    columns |= {_escaped(column.header): [_cell(cell) for cell in column.cells] for column in table.columns}
    if table.same_seeds is None:
        columns["seeds"] = list(map(str, table.seeds))
    return markdown_columns(columns)


def markdown_columns(columns: Mapping[str, Sequence[str]]) -> str:
    """Return columns of text by header, of which the first is aligned left and the others right."""
    lines = [list(columns), ["---", *["---:"] * (len(columns) - 1)], *zip(*columns.values(), strict=True)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    text = f"{cell.number} ± {cell.spread}" if cell.spread else cell.number
    return (f"**{text}**" if cell.rank == 1 else text) + _escaped(cell.stars)


def _escaped(text: str) -> str:
    for letter in "\\|*<[":
        text = text.replace(letter, f"\\{letter}")
    return text
