"""Validation examples that the user's data mark are the clients' validation examples, in every reader and partition."""

import json

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from PIL import Image

from rayfed.core.errors import UsageError
from rayfed.data.dataset import Dataset
from rayfed.data.loading import build_data, client_table, load, load_partitioned
from rayfed.data.partitions.base import describe_validation
from rayfed.data.partitions.file import save
from rayfed.data.partitions.summary import describe
from rayfed.data.sets.npz import Npz

SPLIT = np.array(["train", "train", "val", "train", "test"] * 12)
SITE = np.arange(60) // 5 % 3
LABEL = np.arange(60) // 15 % 2
TABLE = pd.DataFrame({"row": np.arange(60.0), "y": LABEL, "site": SITE})
ROLES = {"features": ["row"], "label": "y", "client": "site"}


def rows_with(split):
    return np.flatnonzero(split == SPLIT).tolist()


def held(population):
    """The numbers of the rows in the training, validation and test parts of all clients."""
    numbers = [[], [], []]
    for client in population.clients:
        for found, part in zip(numbers, client.parts, strict=True):
            found += np.asarray(part.x[:])[(slice(None), *[0] * len(part.shape))].astype(int).tolist()
    return [sorted(found) for found in numbers]


def own_split():
    return [rows_with(split) for split in ("train", "val", "test")]


def in_parquet(folder, names):
    TABLE.assign(part=pd.Series(SPLIT).map(names)).to_parquet(folder / "visits.parquet")
    return "parquet", ROLES | {"file": str(folder / "visits.parquet"), "split": "part"}


def in_csv(folder, names):
    TABLE.assign(part=pd.Series(SPLIT).map(names).astype("category")).to_csv(folder / "visits.csv", index=False)
    return "csv", ROLES | {"file": str(folder / "visits.csv"), "split": "part"}


def in_files_of_splits(folder, names):
    for split, name in names.items():
        TABLE[split == SPLIT].to_parquet(folder / f"{name}-00000-of-00001.parquet")
    return "huggingface", ROLES | {"folder": str(folder)}


def in_folders_of_splits(folder, names):
    for split, name in names.items():
        (folder / name).mkdir()
        TABLE[split == SPLIT].to_parquet(folder / name / "0.parquet")
    return "huggingface", ROLES | {"folder": str(folder)}


def saved_by_datasets(folder, names):
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(names.values())}))
    for split, name in names.items():
        (folder / name).mkdir()
        table = pa.Table.from_pandas(TABLE[split == SPLIT], preserve_index=False)
        with (
            pa.OSFile(str(folder / name / "data.arrow"), "wb") as sink,
            pa.ipc.new_stream(sink, table.schema) as writer,
        ):
            writer.write_table(table)
        state = {"_data_files": [{"filename": "data.arrow"}], "_split": name}
        (folder / name / "state.json").write_text(json.dumps(state))
    return "huggingface", ROLES | {"folder": str(folder)}


def in_npz(folder, names):
    arrays = {"images": TABLE[["row"]].to_numpy(), "labels": LABEL, "client": SITE}
    np.savez(folder / "visits.npz", split=np.array([names[split] for split in SPLIT]), **arrays)
    return "npz", {"file": str(folder / "visits.npz")}


def in_npz_with_marks(folder, names):
    arrays = {"images": TABLE[["row"]].to_numpy(), "labels": LABEL, "client": SITE}
    marks = {"is_val": SPLIT == "val", "is_test": (SPLIT == "test").astype(np.uint8)}
    np.savez(folder / "visits.npz", **arrays, **marks)
    return "npz", {"file": str(folder / "visits.npz")}


def in_folders_of_images(folder, names):
    for row, split in enumerate(SPLIT):
        path = folder / names[split] / f"site{SITE[row]}" / f"class{LABEL[row]}" / f"{row}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (row, row, row)).save(path)
    return "imagefolder", {"folder": str(folder), "size": 8}


NAMES = [
    {"train": "train", "val": "val", "test": "test"},
    {"train": "training", "val": "validation", "test": "testing"},
    {"train": "Train", "val": "Valid", "test": "TEST"},
    {"train": "train", "val": "dev", "test": "test"},
]
READERS = [
    in_parquet,
    in_csv,
    in_files_of_splits,
    in_folders_of_splits,
    saved_by_datasets,
    in_npz,
    in_npz_with_marks,
    in_folders_of_images,
]


@pytest.mark.parametrize("names", NAMES, ids=lambda names: names["val"])
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_every_reader_keeps_the_users_split(tmp_path, reader, names):
    name, options = reader(tmp_path, names)
    population = load(name, options)
    assert held(population) == own_split()
    assert population.test_source.endswith("validated on the dataset's own validation examples")
    assert len(population.clients) == 3
    assert all(len(part) for client in population.clients for part in client.parts)
    assert ", validated on the dataset's own validation examples\n" in describe(*load_partitioned(name, options))


def dataset(**others):
    sites = {"domain": SITE, "domains": ("a", "b", "c"), "client": SITE}
    marks = {"is_test": SPLIT == "test", "is_val": SPLIT == "val"}
    return Dataset.of("visits", np.arange(60.0)[:, None], LABEL, **{**sites, **marks, **others})


def parts_of(name, data, **options):
    partition = build_data("mini_digits", {}, name, options)[1]
    clients = partition.split(data)
    return clients, [sorted(np.concatenate(part).tolist()) for part in zip(*(c[2:] for c in clients), strict=True)]


PARTITIONS = {
    "domains": {"clients_per_domain": 2},
    "natural": {},
    "classes": {"groups": 2},
    "iid": {"clients": 4},
    "quantity": {"clients": 2, "alpha": 10.0, "min_size": 1},
    "dirichlet": {"clients": 2, "alpha": 10.0, "min_size": 1},
    "lda": {"clients": 2, "alpha": 10.0},
    "label_k": {"clients": 4, "classes_per_client": 2},
    "pathological": {"clients": 4, "classes_per_client": 2},
    "shards": {"clients": 4, "shards_per_client": 2},
}


@pytest.mark.parametrize("name", PARTITIONS)
class TestPartitions:
    def test_nothing_new_is_drawn(self, name):
        assert parts_of(name, dataset(), **PARTITIONS[name])[1] == own_split()

    @pytest.mark.parametrize("test", [0.25, 0.5])
    def test_tests_that_are_drawn_leave_them_out(self, name, test):
        if name == "classes":
            pytest.skip("this partition draws no tests")
        clients, (train, val, tested) = parts_of(name, dataset(), **PARTITIONS[name], test=test)
        assert val == rows_with("val")
        assert sorted(train + tested) == sorted(rows_with("train") + rows_with("test"))
        assert len(tested) == pytest.approx(48 * test, abs=len(clients))

    def test_a_share_counts_in_place_of_them(self, name):
        clients, (train, val, tested) = parts_of(name, dataset(), **PARTITIONS[name], validation=0.5)
        assert sorted(train + val) == sorted(rows_with("train") + rows_with("val"))
        assert tested == rows_with("test")
        assert set(rows_with("val")) - set(val)
        trained = describe_validation(dataset(), clients)
        assert (
            trained == f"trained on {len(set(rows_with('val')) & set(train))} of the dataset's own validation examples"
        )
        assert not parts_of(name, dataset(), **PARTITIONS[name], validation=0.0)[1][1]

    def test_groups_of_one_original_stay_together(self, name):
        """Rows 2k and 2k + 1 show one original; a training row beside a validation row is validated on, too."""
        split = np.repeat(SPLIT[:30], 2)
        split[1::2][split[::2] == "val"] = "train"
        marks = {"is_test": split == "test", "is_val": split == "val"}
        _, (train, val, _) = parts_of(name, dataset(leakage_group=np.arange(60) // 2, **marks), **PARTITIONS[name])
        assert val == sorted([*np.flatnonzero(split == "val"), *np.flatnonzero(split == "val") + 1])
        assert not set(train) & set(val)


class TestPartitionFile:
    def parts(self, tmp_path, data, clients, **options):
        save(data, clients, tmp_path / "split.parquet")
        return parts_of("file", data, file=str(tmp_path / "split.parquet"), **options)[1]

    def test_val_rows_of_the_file_come_first(self, tmp_path):
        clients = parts_of("iid", dataset(is_val=None), clients=3, validation=0.5)[0]
        expected = [sorted(np.concatenate(part).tolist()) for part in zip(*(c[2:] for c in clients), strict=True)]
        assert self.parts(tmp_path, dataset(), clients) == expected

    def test_without_these_the_dataset_says_what_is_for_validation(self, tmp_path):
        clients = parts_of("iid", dataset(), clients=3, validation=0.0)[0]
        assert self.parts(tmp_path, dataset(), clients) == own_split()
        assert self.parts(tmp_path, dataset(), clients, validation=0.0)[1] == []

    def test_a_file_without_the_datasets_validation_rows_draws(self, tmp_path):
        clients = parts_of("iid", dataset(), clients=3)[0]
        clients = [client._replace(val=client.val[:0]) for client in clients]
        val = self.parts(tmp_path, dataset(), clients)[1]
        assert len(val) == 3
        assert set(val) < set(rows_with("train"))

    @pytest.mark.parametrize("word", ["dev", "Validation", "valid"])
    def test_other_spellings(self, tmp_path, word):
        file = tmp_path / "split.parquet"
        split = pd.Series(SPLIT).replace("val", word)
        table = pd.DataFrame({"client": SITE, "split": split, "source": "all", "index": np.arange(60)})
        table.to_parquet(file)
        assert parts_of("file", dataset(is_val=None, is_test=np.zeros(60, bool)), file=str(file))[1] == own_split()


def test_train_and_val_alone_of_images_are_torchvisions_training_and_test_images(tmp_path):
    names = {"train": "train", "val": "val", "test": "train"}
    population = load(*in_folders_of_images(tmp_path, names))
    train, val, test = held(population)
    assert test == rows_with("val")
    assert sorted(train + val) == sorted(rows_with("train") + rows_with("test"))


def test_a_hub_dataset_without_a_test_split_draws_tests_from_the_others(tmp_path):
    names = {"train": "train", "val": "validation"}
    train, val, test = held(load(*in_files_of_splits(tmp_path, names)))
    assert val == rows_with("val")
    assert sorted(train + test) == rows_with("train")
    assert len(test) == 9


def test_a_limit_of_training_images_leaves_validation_images(tmp_path):
    name, options = in_folders_of_images(tmp_path, NAMES[0])
    train, val, test = held(load(name, options | {"per_party": 3}))
    assert (len(train), val, test) == (9, rows_with("val"), rows_with("test"))


class TestOtherNames:
    def test_of_rows(self, tmp_path):
        for reader in (in_parquet, in_csv, in_npz):
            with pytest.raises(
                UsageError, match=r"split|part.* has 'holdout'; expected train, val or test, also training"
            ):
                load(*reader(tmp_path, NAMES[0] | {"val": "holdout"}))

    def test_of_files(self, tmp_path):
        with pytest.raises(
            UsageError, match=r"holdout-.*parquet: its name has no split, as other files have; expected"
        ):
            load(*in_files_of_splits(tmp_path, NAMES[0] | {"val": "holdout"}))

    def test_of_splits_that_were_saved_by_datasets(self, tmp_path):
        name, options = saved_by_datasets(tmp_path, NAMES[0] | {"val": "unsupervised"})
        words = r"the split unsupervised is none of train, val and test; name those to read, data.splits=\[train, unsup"
        with pytest.raises(UsageError, match=words):
            load(name, options)
        assert held(load(name, options | {"splits": ["train", "test"]}))[2] == rows_with("test")
        asked = held(load(name, options | {"splits": ["train", "unsupervised", "test"]}, None, {"validation": 0.0}))
        assert asked[0] == sorted(rows_with("train") + rows_with("val"))

    def test_of_folders(self, tmp_path):
        with pytest.raises(UsageError, match="is named like a split"):
            load(*in_folders_of_images(tmp_path, NAMES[0] | {"val": "holdout"}))


class TestNpz:
    def write(self, tmp_path, **changes):
        arrays = {"images": TABLE[["row"]].to_numpy(), "labels": LABEL, "client": SITE, "is_test": SPLIT == "test"}
        np.savez(tmp_path / "visits.npz", **{**arrays, **changes})
        return Npz(file=str(tmp_path / "visits.npz"))

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"is_val": SPLIT != "train"}, "is_val and is_test both mark row 4; a row has one split"),
            ({"split": np.where(SPLIT == "test", "train", SPLIT)}, "is_test and split say different things of row 4"),
            ({"split": np.arange(60) % 3}, "split is int64; expected words, train, val or test"),
            ({"is_val": np.arange(60)}, r"is_val is int64 \[60\]; expected booleans \[N\]"),
        ],
    )
    def test_marks_that_contradict_each_other(self, tmp_path, changes, words):
        with pytest.raises(UsageError, match=words):
            self.write(tmp_path, **changes).load()

    def test_arrays_that_are_not_read_are_named(self, tmp_path, capsys):
        self.write(tmp_path, is_validation=SPLIT == "val").load()
        assert "visits.npz: arrays that are not read: is_validation\n" in capsys.readouterr().err


def test_a_partition_that_draws_all_the_same_is_described():
    """Such as one of the user's that calls `client_rows` without the mask."""
    data = dataset()
    partition = build_data("mini_digits", {}, "iid", {})[1]
    fit = data.rows(is_test=False)
    clients = [partition.client_rows(0, "a", fit, data.rows(is_test=True))]
    trained = len(set(clients[0].train) & set(rows_with("val")))
    assert describe_validation(data, clients) == f"trained on {trained} of the dataset's own validation examples"
    assert len(client_table(data, clients)) == 1
