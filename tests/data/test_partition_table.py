"""A partition saved, read back, hashed, drawn and printed, and the command that does it."""

import numpy as np
import pandas
import pytest
from PIL import Image

from helpers.commands import command
from helpers.partitions import OWNED, split, toy
from helpers.published_data import SPLIT, needs
from rayfed.core.errors import UsageError
from rayfed.data.loading import load, load_partitioned
from rayfed.data.partitions.base import partition_hash
from rayfed.data.partitions.file import save
from rayfed.data.partitions.summary import describe

main = command("partition")


pytestmark = pytest.mark.usefixtures("here")


class TestSavedAndRead:
    @pytest.mark.parametrize(
        ("name", "options", "changes"),
        [
            ("dirichlet", {"clients": 6}, {}),
            ("domains", {"clients_per_domain": 2, "validation": 0.0}, {}),
            ("natural", {}, OWNED),
        ],
    )
    def test_every_row_is_where_it_was(self, name, options, changes):
        dataset = toy(**changes)
        parts = split(name, dataset, **options)
        save(dataset, parts, "some/folder/split.parquet")
        again = split("file", dataset, file="some/folder/split.parquet", validation=options.get("validation", 0.1))
        for before, after in zip(parts, again, strict=True):
            assert (before.id, before.domain) == (after.id, after.domain)
            for rows, same in zip(before[2:], after[2:], strict=True):
                np.testing.assert_array_equal(rows, same)  # in the same order, too
        assert partition_hash(dataset, again) == partition_hash(dataset, parts)

    def test_the_table_names_rows_by_their_origin(self):
        dataset = toy(8, source=np.repeat([1, 0], 4), sources=("new", "old"), index=np.r_[4:8, :4])
        parts = split("domains", dataset, validation=0.5)
        save(dataset, parts, "split.parquet")
        table = pandas.read_parquet("split.parquet")
        assert list(table.columns) == ["client", "split", "source", "index", "domain"]
        first = table[table.client == 0].sort_values("index")
        assert first["source"].tolist() == ["old"] * 4
        assert first["index"].tolist() == [4, 5, 6, 7]
        assert first["split"].tolist()[0] == "test"  # the row 0
        assert sorted(first["split"].tolist()) == ["test", "train", "train", "val"]
        assert set(table[table.client == 1]["domain"]) == {"right"}

    def test_what_cannot_be_saved(self):
        dataset = toy(8, index=np.zeros(8, int))
        with pytest.raises(UsageError, match=r"split.parquet: rows of toy have the same source and index"):
            save(dataset, split("domains", dataset), "split.parquet")
        with pytest.raises(UsageError, match=r"cannot be written"):
            save(toy(), split("domains", toy()), "/dev/null/split.parquet")

    @needs("MNIST/raw")
    @needs("partitions/mnist_dir0.1_20clients.parquet")
    def test_the_published_split_is_itself_again(self):
        options = {"file": str(SPLIT), "validation": 0.0}
        dataset, parts = load_partitioned("mnist", {}, "file", options)
        published = pandas.read_parquet(SPLIT)
        save(dataset, parts, "again.parquet")
        columns = ["client", "split", "source", "index"]
        again = pandas.read_parquet("again.parquet")[columns].sort_values(columns, ignore_index=True)
        pandas.testing.assert_frame_equal(
            again, published[columns].sort_values(columns, ignore_index=True), check_dtype=False
        )
        assert partition_hash(dataset, parts) == "b049df6e89bf"


class TestHash:
    def test_is_the_same_for_ever_and_does_not_ask_for_the_order(self):
        dataset = toy()
        parts = split("iid", dataset, clients=3, test=0.25)
        assert partition_hash(dataset, parts) == "344b803f84d0"
        turned = [part._replace(train=part.train[::-1]) for part in parts]
        assert partition_hash(dataset, turned) == "344b803f84d0"


def test_table():
    options = {"domains": ["plain", "font"], "per_domain": 50}
    assert describe(*load_partitioned("mini_digits", options, leave_out="font")).splitlines() == [
        "mini_digits: 1 client, 10 classes, inputs 3 x 28 x 28",
        "client  domain  train  val  test  classes",
        "0       plain      36    4    10  0 1 2 3 4 5 6 7 8 9",
        "all                36    4    10  10",
        "server  font                  50  0 1 2 3 4 5 6 7 8 9 (ood)",
        f"partition {load('mini_digits', options, leave_out='font').partition_hash}",
    ]


class TestCommand:
    def test_prints_saves_and_draws(self, capsys):
        given = ["data.per_domain=40", "--save", "s.parquet", "partition.name=iid", "partition.clients=4"]
        assert main([*given, "--plot", "p.png", "--examples", "e.png"]) == 0
        *printed, plot, examples = capsys.readouterr().out.splitlines()
        assert printed[0] == "mini_digits: 4 clients, 10 classes, inputs 3 x 28 x 28"
        assert printed[-1] == "saved: partition.name=file partition.file=s.parquet"
        assert (plot, examples) == ("plot: p.png", "examples: e.png")
        assert Image.open("e.png").size[0] > 16 * 56
        assert main(["data.per_domain=40", "partition.name=file", "partition.file=s.parquet"]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == printed[-2]
        assert printed[-2].startswith("partition ")

    @pytest.mark.parametrize(
        ("given", "words"),
        [
            (["--plot", "p.gif"], "p.gif: plots are PNG, PDF or SVG"),
            (["partition.name=shard"], "did you mean shards?"),
            (["--sav", "x", "--wrong"], "--wrong"),
            (["none.yaml"], "none.yaml: no such file"),
        ],
    )
    def test_what_is_wrong_is_one_line(self, capsys, given, words):
        assert main(["data.per_domain=40", *given]) == 2
        printed = capsys.readouterr()
        assert words in printed.err
        assert printed.err.count("\n") == 1
