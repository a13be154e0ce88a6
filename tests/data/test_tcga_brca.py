"""TCGA-BRCA: files in FLamby's form, made here, and the published ones where RAYFED_DATA has them."""

import numpy as np
import pandas as pd
import pytest

from helpers.published_data import needs
from rayfed.core.errors import UsageError
from rayfed.data.sets.tcga_brca import REGIONS, TcgaBrca


@pytest.fixture
def folder(tmp_path):
    """Thirteen patients, two of whom are in every region, and one in no region."""
    (tmp_path / "TCGA_BRCA").mkdir()
    rng = np.random.default_rng(0)
    names = [f"P{number}" for number in range(13)]
    table = pd.DataFrame(rng.integers(0, 2, (13, 39)), columns=[f"x{k}" for k in range(39)])
    table.insert(0, "pid", names)
    table = table.assign(E=rng.integers(0, 2, 13).astype(float), T=np.arange(13.0))
    table.to_csv(tmp_path / "TCGA_BRCA" / "brca.csv", index=False)
    folds = ["train", "test"] * 6
    regions = [f"{fold}_{number // 2}" for number, fold in enumerate(folds)]
    split = pd.DataFrame({"pid": names[:12], "fold": folds, "fold2": regions})
    split.iloc[::-1].to_csv(tmp_path / "TCGA_BRCA" / "train_test_split.csv", index=False)
    return tmp_path


def test_patients_have_their_region_split_event_and_time(folder):
    dataset = TcgaBrca(root=str(folder)).load()
    table = pd.read_csv(folder / "TCGA_BRCA" / "brca.csv")[:12]
    assert dataset.images.shape == (12, 39)
    np.testing.assert_array_equal(dataset.images, table.iloc[:, 1:40])
    np.testing.assert_array_equal(dataset.labels, table[["E", "T"]])
    assert [dataset.domains[k] for k in dataset.domain] == [name for name in REGIONS for _ in range(2)]
    assert dataset.is_test.tolist() == [False, True] * 6
    assert dataset.index.tolist() == list(range(12))


def test_regions_can_be_chosen(folder):
    dataset = TcgaBrca(root=str(folder), domains=["canada", "south"]).load()
    assert dataset.domains == ("canada", "south")
    assert dataset.index.tolist() == [2, 3, 10, 11]
    assert dataset.domain.tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize("name", ["brca.csv", "train_test_split.csv"])
def test_a_damaged_file_is_refused(folder, name):
    (folder / "TCGA_BRCA" / name).write_text("a,fold2\n1,2\n")
    with pytest.raises(UsageError, match=f"{name}: missing, empty, truncated, damaged or not a CSV file"):
        TcgaBrca(root=str(folder)).load()


def test_missing_files_are_named(tmp_path):
    with pytest.raises(UsageError, match=r"expected brca.csv and train_test_split.csv; from .*data.download=true"):
        TcgaBrca(root=str(tmp_path)).load()


@needs("tcga_brca")
def test_the_published_files_have_the_patients_that_flamby_counts():
    dataset = TcgaBrca().load()
    counts = [[((dataset.domain == k) & (dataset.is_test == t)).sum() for t in (False, True)] for k in range(6)]
    assert counts == [[248, 63], [156, 40], [164, 42], [129, 33], [129, 33], [40, 11]]
