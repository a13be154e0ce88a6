"""The Parquet files of one trial in one table: `<trial>-0000.parquet` and on.

Each time rows are added, the last file is rewritten; past `SEGMENT_ROWS` a new one begins, so that writing costs the
same late in a long run as early. A row never moves from one file to another, and no file is ever deleted. A reader who
has just listed the folder therefore finds every file, and no row in two of them.
"""

import re
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rayfed.results.files import replace_parquet

SEGMENT_ROWS = 200_000


class Segments:
    """Appends rows to one table of one trial.

    Rows of an earlier attempt are kept up to and including `keep_through_round` (None: none are kept). `last_round` is
    the last round that was kept, or None.
    """

    def __init__(
        self,
        folder: Path,
        trial: str,
        schema: pa.Schema,
        *,
        keep_through_round: int | None,
        segment_rows: int = SEGMENT_ROWS,
    ):
        self._folder = folder
        self._trial = trial
        self._segment_rows = segment_rows
        self._index = 0
        self._current = schema.empty_table()
        self.last_round: int | None = None
        for index, path in _existing(folder, trial):
            self._index = index
            self._current = self._trimmed(path, schema, keep_through_round)

    def append(self, rows: pa.Table) -> None:
        """Write `rows` to disk; a crash leaves all of them or none."""
        full = self._current.num_rows >= self._segment_rows
        index = self._index + 1 if full else self._index
        table = rows if full else pa.concat_tables([self._current, rows])
        replace_parquet(table, self._folder / f"{self._trial}-{index:04d}.parquet")
        self._index, self._current = (
            index,
            table,
        )  # only now, so that the same rows can be given again after a full disk

    def _trimmed(self, path: Path, schema: pa.Schema, keep_through_round: int | None) -> pa.Table:
        # Trimming twice does no harm, so a crash between two files needs no special care.
        table = pq.ParquetFile(path).read()
        table = pa.concat_tables([schema.empty_table(), table], promote_options="default")  # older: fewer columns
        if keep_through_round is None:
            kept = table.slice(0, 0)
        else:
            kept = table.filter(pc.less_equal(table["round"], keep_through_round))
        if kept.num_rows < table.num_rows:
            replace_parquet(kept, path)
        if kept.num_rows:
            last = pc.max(kept["round"]).as_py()
            self.last_round = last if self.last_round is None else max(last, self.last_round)
        return kept


def _existing(folder: Path, trial: str) -> list[tuple[int, Path]]:
    if not folder.is_dir():
        return []
    name = re.compile(re.escape(trial) + r"-(\d{4,})\.parquet")
    matches = ((name.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted((int(match[1]), path) for match, path in matches if match)
