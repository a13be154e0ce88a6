"""The Parquet files of one trial in one table: `<trial>-0000.parquet` and on.

Each time rows are added, the last file is rewritten; past `SEGMENT_ROWS` a new one begins, so that writing costs the
same late in a long run as early. A row never moves from one file to another, and no file is ever deleted. A reader who
has just listed the folder therefore finds every file, and no row in two of them.
"""

import re

import pyarrow as pa
import pyarrow.compute as pc

from rayfed.records.files import read_parquet, replace_parquet
from rayfed.records.storage import Storage

SEGMENT_ROWS = 200_000


class Segments:
    """Appends rows to one table of one trial.

    Rows of an earlier attempt are kept up to and including `keep_through_round` (None: none are kept). `last_round` is
    the last round that was kept, or None.
    """

    def __init__(
        self,
        folder: Storage,
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
        for index, name in _existing(folder, trial):
            self._index = index
            self._current = self._trimmed(name, keep_through_round)

    def append(self, rows: pa.Table) -> None:
        """Write `rows` to disk; a crash leaves all of them or none."""
        full = self._current.num_rows >= self._segment_rows
        index = self._index + 1 if full else self._index
        table = rows if full else pa.concat_tables([self._current, rows])
        replace_parquet(table, self._folder, f"{self._trial}-{index:04d}.parquet")
        # only now, so that the same rows can be given again after a full disk
        self._index, self._current = index, table

    def _trimmed(self, name: str, keep_through_round: int | None) -> pa.Table:
        # Trimming twice does no harm, so a crash between two files needs no special care.
        table = read_parquet(self._folder, name)
        if keep_through_round is None:
            kept = table.slice(0, 0)
        else:
            kept = table.filter(pc.less_equal(table["round"], keep_through_round))
        if kept.num_rows < table.num_rows:
            replace_parquet(kept, self._folder, name)
        if kept.num_rows:
            last = pc.max(kept["round"]).as_py()
            self.last_round = last if self.last_round is None else max(last, self.last_round)
        return kept


def _existing(folder: Storage, trial: str) -> list[tuple[int, str]]:
    name = re.compile(re.escape(trial) + r"-(\d{4,})\.parquet")
    matches = (name.fullmatch(file) for file in folder.files())
    return sorted((int(match[1]), match[0]) for match in matches if match)
