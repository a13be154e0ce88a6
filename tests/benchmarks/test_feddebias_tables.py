"""FedDebias's tables have its baselines as appendix A of the paper sets them up, and say what they do not tune."""

from pathlib import Path

import pytest

from rayfed.experiments.sources import from_file, merged

TABLES = sorted((Path(__file__).parents[2] / "benchmarks" / "papers").glob("feddebias_*.yaml"))
TUNED = {  # row -> its option, and the grid as a note has it
    "FedProx": ("mu", "FedProx's mu {} (of 0.001, 0.01, 0.1)"),
    "MOON": ("mu", "MOON's mu {} (of 0.01, 0.1, 1, 10)"),
    "DANN": ("weight_adversary", "DANN's weight {} (of 0.01, 0.1, 1)"),
    "FedMix": ("lam", "FedMix's lambda {} (of 0.01, 0.1, 0.2)"),
}


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_notes_name_what_the_paper_tunes(path):
    table = from_file(path)
    note = table["full"]["note"]
    for row, (key, words) in TUNED.items():
        wanted = row in table["rows"]
        value = f"{table['rows'][row]['arm']['algorithm'][key]:g}" if wanted else ""
        assert (words.format(value) in note) is wanted, row


def test_moon_has_the_papers_projection_head():
    tables = {path.stem: from_file(path) for path in TABLES}
    rows = {name: table["rows"]["MOON"] for name, table in tables.items() if "MOON" in table["rows"]}
    assert len(rows) == 5
    assert all(row["arm"]["algorithm"]["widths"] == [256, 128] for row in rows.values())
    narrow, row = tables["feddebias_table1_mnist"]["small"]["model"]["hidden"][-1], rows["feddebias_table1_mnist"]
    assert max(merged(row["arm"], row["small"])["algorithm"]["widths"]) <= narrow
