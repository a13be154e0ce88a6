"""Folders of tables: columns of several types, and columns in the names of folders, as pandas and pyarrow read them."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayfed.core.errors import UsageError
from rayfed.data.sets.labelled_table import HuggingFace, Table

RNG = np.random.default_rng(0)
TABLE = pd.DataFrame(
    {
        "age": RNG.integers(20, 90, 30).astype(float),
        "y": np.arange(30) % 2,
        "site": np.array(["north", "south", "east"])[np.arange(30) % 3],
    }
)
ROLES = {"features": ["age"], "label": "y", "client": "site"}


def loaded(folder, **changes):
    return Table(file=str(folder), **{**ROLES, **changes}).load()


def pairs(dataset):
    """The sorted triples of feature, label and client."""
    return sorted(zip(dataset.images[:, 0].tolist(), dataset.labels.tolist(), dataset.client.tolist(), strict=True))


EXPECTED = sorted(zip(TABLE["age"], TABLE["y"], TABLE["site"].map({"east": 0, "north": 1, "south": 2}), strict=True))


class TestTypes:
    @pytest.mark.parametrize("first", ["int64", "float64", "int8", "uint8", "float32", "Int32"])
    @pytest.mark.parametrize("second", ["int64", "float64", "int16"])
    def test_numbers_of_several_types(self, tmp_path, first, second):
        for name, rows in TABLE.groupby("site"):
            rows.astype({"age": first if name == "east" else second}).to_parquet(tmp_path / f"{name}.parquet")
        assert pairs(loaded(tmp_path)) == EXPECTED

    @pytest.mark.parametrize("kinds", [("bool", "int64"), ("int8", "int64"), ("float64", "int32"), ("uint64", "int64")])
    def test_labels_of_several_types(self, tmp_path, kinds):
        TABLE[:10].astype({"y": kinds[0]}).to_parquet(tmp_path / "a.parquet")
        TABLE[10:].astype({"y": kinds[1]}).to_parquet(tmp_path / "b.parquet")
        assert pairs(loaded(tmp_path)) == EXPECTED

    def test_a_half_stays_a_half(self, tmp_path):
        pd.DataFrame({"age": [1, 2], "y": [0, 1]}).to_parquet(tmp_path / "a.parquet")
        pd.DataFrame({"age": [0.5, 1.5], "y": [0, 1]}).to_parquet(tmp_path / "b.parquet")
        assert loaded(tmp_path, client=None).images[:, 0].tolist() == [1.0, 2.0, 0.5, 1.5]

    @pytest.mark.parametrize("kind", ["category", "string", "string[pyarrow]"])
    def test_words_and_categories(self, tmp_path, kind):
        TABLE[:10].astype({"site": kind}).to_parquet(tmp_path / "a.parquet")
        TABLE[10:].to_parquet(tmp_path / "b.parquet")
        assert pairs(loaded(tmp_path)) == EXPECTED

    @pytest.mark.parametrize(
        "kinds",
        [
            (pa.list_(pa.int64()), pa.list_(pa.float64())),
            (pa.list_(pa.float32()), pa.large_list(pa.float64())),
            (pa.list_(pa.float32(), 2), pa.list_(pa.float64())),
        ],
    )
    def test_lists(self, tmp_path, kinds):
        for name, kind, cells in zip("ab", kinds, ([[1, 2]], [[3, 4]]), strict=True):
            pq.write_table(pa.table({"x": pa.array(cells, kind), "y": [0]}), tmp_path / f"{name}.parquet")
        assert loaded(tmp_path, features=["x"], client=None).images.tolist() == [[1, 2], [3, 4]]

    def test_one_row_of_text_among_numbers_is_one_line(self, tmp_path):
        TABLE[:10].to_parquet(tmp_path / "a.parquet")
        TABLE[10:].astype({"age": str}).to_parquet(tmp_path / "b.parquet")
        with pytest.raises(
            UsageError, match=r"b.parquet: column 'age' is string, but double in a.parquet; write it in one"
        ):
            loaded(tmp_path)

    def test_a_column_without_a_value_in_one_file(self, tmp_path):
        TABLE[:10].to_parquet(tmp_path / "a.parquet")
        pq.write_table(pa.table({"age": pa.nulls(2), "y": [0, 1], "site": ["north"] * 2}), tmp_path / "b.parquet")
        with pytest.raises(UsageError, match=r"b.parquet: row 0: column 'age' is empty, as in 2 of 12 rows"):
            loaded(tmp_path)


class TestFolders:
    def test_partition_cols(self, tmp_path):
        TABLE.to_parquet(tmp_path / "visits", partition_cols=["site"])
        assert not any("site" in pq.read_schema(path).names for path in tmp_path.rglob("*.parquet"))
        assert pairs(loaded(tmp_path / "visits")) == EXPECTED

    def test_several_levels_and_other_roles(self, tmp_path):
        table = TABLE.assign(part=np.array(["train", "val", "test"])[np.arange(30) // 3 % 3])
        table.to_parquet(tmp_path / "visits", partition_cols=["part", "site"])
        dataset = loaded(tmp_path / "visits", split="part")
        assert pairs(dataset) == EXPECTED
        assert sorted(dataset.images[dataset.is_val, 0]) == sorted(table["age"][table["part"] == "val"])
        assert sorted(dataset.images[dataset.is_test, 0]) == sorted(table["age"][table["part"] == "test"])

    def test_numbers_in_names(self, tmp_path):
        table = TABLE.assign(site=np.array([2, 10, 7])[np.arange(30) % 3], dose=np.array([0.5, 2])[np.arange(30) % 2])
        table.to_parquet(tmp_path / "visits", partition_cols=["site", "dose", "y"])
        dataset = loaded(tmp_path / "visits", features=["age", "dose"])
        assert sorted(set(dataset.client.tolist())) == [2, 7, 10]
        found = sorted(zip(dataset.images.tolist(), dataset.labels.tolist(), dataset.client.tolist(), strict=True))
        assert found == sorted(zip(table[["age", "dose"]].values.tolist(), table["y"], table["site"], strict=True))

    def test_codes_and_signs_in_names(self, tmp_path):
        table = TABLE.assign(site=TABLE["site"].map({"east": "007", "north": "a b/c", "south": "ü=1"}))
        table.to_parquet(tmp_path / "visits", partition_cols=["site"])
        assert pairs(loaded(tmp_path / "visits")) == EXPECTED
        assert loaded(tmp_path / "visits", domain="site").domains == ("007", "a b/c", "ü=1")

    def test_a_column_of_the_file_counts(self, tmp_path):
        folder = tmp_path / "visits" / "site=elsewhere"
        folder.mkdir(parents=True)
        TABLE.to_parquet(folder / "0.parquet")
        assert pairs(loaded(tmp_path / "visits")) == EXPECTED

    def test_a_missing_value_is_an_empty_cell(self, tmp_path):
        TABLE.assign(site=TABLE["site"].replace("east", None)).to_parquet(tmp_path / "visits", partition_cols=["site"])
        with pytest.raises(UsageError, match=r"row 0: column 'site' is empty, as in 10 of 30 rows"):
            loaded(tmp_path / "visits")

    def test_csv_files(self, tmp_path):
        for name, rows in TABLE.groupby("site"):
            (tmp_path / f"site={name}").mkdir()
            rows.drop(columns="site").to_csv(tmp_path / f"site={name}" / "0.csv", index=False)
        assert pairs(loaded(tmp_path)) == EXPECTED

    def test_a_dataset_of_the_hub(self, tmp_path):
        for split, rows in (("train", TABLE[:20]), ("test", TABLE[20:])):
            rows.to_parquet(tmp_path / split, partition_cols=["site"])
        dataset = HuggingFace(folder=str(tmp_path), **ROLES).load()
        assert pairs(dataset) == EXPECTED
        assert sorted(dataset.images[dataset.is_test, 0]) == sorted(TABLE["age"][20:])

    def test_files_of_two_kinds_are_refused(self, tmp_path):
        TABLE.to_parquet(tmp_path / "a.parquet")
        TABLE.to_csv(tmp_path / "b.csv", index=False)
        with pytest.raises(UsageError, match=r"a folder with files of two kinds \(1 Parquet and 1 CSV\); keep one"):
            loaded(tmp_path)


class TestCsvFiles:
    @pytest.mark.parametrize("ending", ["csv", "tsv", "csv.gz", "csv.bz2", "CSV.xz", "tsv.gz"])
    def test_compressed_ones_are_read(self, tmp_path, ending):
        compression = {"gz": "gzip", "bz2": "bz2", "xz": "xz"}.get(ending.rpartition(".")[2])
        path = tmp_path / f"visits.{ending}"
        TABLE.to_csv(path, index=False, sep="\t" if "tsv" in ending else ",", compression=compression)
        assert pairs(loaded(path)) == EXPECTED
        assert pairs(loaded(tmp_path)) == EXPECTED

    def test_lines_are_counted_in_them(self, tmp_path):
        TABLE.assign(age=["old", *TABLE["age"][1:]]).to_csv(tmp_path / "visits.csv.gz", index=False)
        with pytest.raises(UsageError, match=r"visits.csv.gz: line 2: column 'age' has 'old', no number"):
            loaded(tmp_path / "visits.csv.gz")

    @pytest.mark.parametrize("name", ["visits.csv", "visits.csv.gz"])
    @pytest.mark.parametrize(("encoding", "line", "byte"), [("latin-1", 4, "0xfc"), ("utf-16", 1, "0xff")])
    def test_other_encodings_are_refused_with_the_line(self, tmp_path, name, encoding, line, byte):
        table = TABLE.assign(site=["a", "b", "Zürich", *["c"] * 27])
        table.to_csv(tmp_path / name, index=False, encoding=encoding)
        words = rf"{name}: line {line} is not UTF-8 \(byte {byte}\); save the file as UTF-8, for example by iconv -f "
        with pytest.raises(UsageError, match=words + {"latin-1": "latin1", "utf-16": "utf-16"}[encoding]):
            loaded(tmp_path / name)
        table.to_csv(tmp_path / name, index=False)
        assert len(loaded(tmp_path / name)) == 30

    def test_damaged_ones_are_one_line(self, tmp_path):
        (tmp_path / "visits.csv.gz").write_bytes(b"\x1f\x8b\x08\x00broken")
        with pytest.raises(UsageError, match=r"visits.csv.gz: missing, empty, truncated, damaged or not a CSV file"):
            loaded(tmp_path / "visits.csv.gz")

    def test_other_endings_name_those_of_csv(self, tmp_path):
        TABLE.to_csv(tmp_path / "visits.txt", index=False)
        with pytest.raises(
            UsageError, match=r"not a Parquet file; CSV files end in .csv or .tsv, also compressed, as .csv"
        ):
            loaded(tmp_path / "visits.txt")
