"""Folders of images in which a client has no image of a class, as clients of a table may."""

import numpy as np
import pytest

from helpers.image_sets import tree
from rayfed.core.errors import UsageError
from rayfed.data.loading import load
from rayfed.data.sets.image_folders import ImageFolder

CLASSES = ("covid", "flu", "healthy")


@pytest.fixture
def photos(tmp_path):
    """Three clinics with four images of each class, of which b has no covid."""
    tree(tmp_path / "photos", ("a", "c"), CLASSES, each=4)
    tree(tmp_path / "photos", ("b",), CLASSES[1:], each=4)
    return tmp_path / "photos"


def loaded(folder, **options):
    return ImageFolder(folder=str(folder), size=8, test=0.0, **options).load()


def held(dataset):
    """The number of images of each class in each domain."""
    return {name: np.bincount(dataset.labels[dataset.domain == n], minlength=dataset.num_classes).tolist()
            for n, name in enumerate(dataset.domains)}  # fmt: skip


@pytest.mark.parametrize("empty", [False, True])
def test_a_clinic_may_lack_a_class(photos, capsys, empty):
    if empty:
        (photos / "b" / "covid").mkdir()
    assert held(loaded(photos)) == {"a": [4, 4, 4], "b": [0, 4, 4], "c": [4, 4, 4]}
    assert capsys.readouterr().err == f"rayfed: {photos}: b has no image of covid\n"
    clients = load("imagefolder", {"folder": str(photos), "size": 8}).clients
    assert [set(np.concatenate([part.y for part in client.parts])) for client in clients] == [
        {0, 1, 2},
        {1, 2},
        {0, 1, 2},
    ]


def test_a_first_clinic_does_not_decide_which_classes_there_are(tmp_path):
    tree(tmp_path / "photos", ("a",), ("flu", "healthy"), each=1)
    tree(tmp_path / "photos", ("b",), ("covid", "flu"), each=1)
    assert held(loaded(tmp_path / "photos")) == {"a": [0, 1, 1], "b": [1, 1, 0]}


def test_a_misspelt_class_is_told(photos, capsys):
    (photos / "c" / "covid").rename(photos / "c" / "covd")
    assert loaded(photos).num_classes == 4
    said = f"{photos}: a has no image of covd; b has no image of covd, covid; c has no image of covid"
    assert capsys.readouterr().err == f"rayfed: {said}\n"


def test_a_long_line_is_cut(tmp_path, capsys):
    tree(tmp_path / "photos", [f"{number:02}" for number in range(12)], ("flu",), each=1)
    tree(tmp_path / "photos", ("99",), ("flu", "covid"), each=1)
    loaded(tmp_path / "photos")
    assert "07 has no image of covid, and 4 more folders lack some\n" in capsys.readouterr().err


def test_a_class_that_nobody_has_is_refused(photos):
    (photos / "a" / "cold").mkdir()
    with pytest.raises(
        UsageError, match=r"photos: the folders of the class cold contain no image; expected files that"
    ):
        loaded(photos)


def test_folders_without_a_common_class_are_refused(tmp_path):
    """Such as folders of patients below those of the classes."""
    tree(tmp_path / "photos", ("ill",), ("p1", "p2"), each=2)
    tree(tmp_path / "photos", ("healthy",), ("p3",), each=2)
    words = (
        r"no class is in two folders, so p1 may be no class; if healthy and ill are classes, give data.domains=\[images"
    )
    with pytest.raises(UsageError, match=words):
        loaded(tmp_path / "photos")
    assert held(loaded(tmp_path / "photos", domains=["images"])) == {"images": [2, 4]}


class TestSplits:
    def test_a_clinic_may_lack_a_class_in_one_of_them(self, tmp_path, capsys):
        tree(tmp_path / "photos/train", ("a", "b"), CLASSES, each=3)
        tree(tmp_path / "photos/val", ("a",), CLASSES, each=1)
        tree(tmp_path / "photos/test", ("a", "b"), CLASSES[1:], each=1)
        dataset = loaded(tmp_path / "photos")
        assert held(dataset) == {"a": [4, 5, 5], "b": [3, 4, 4]}
        assert np.bincount(dataset.labels[dataset.is_test]).tolist() == [0, 2, 2]
        assert np.bincount(dataset.domain[dataset.is_val]).tolist() == [3]
        said = capsys.readouterr().err
        for folder, lacks in (("test/a", "covid"), ("test/b", "covid"), ("val/b", "covid, flu, healthy")):
            assert f"{folder} has no image of {lacks}" in said

    def test_without_clinics(self, tmp_path, capsys):
        tree(tmp_path / "photos", ("train",), CLASSES, each=3)
        tree(tmp_path / "photos", ("test",), CLASSES[1:], each=1)
        assert held(loaded(tmp_path / "photos")) == {"images": [3, 4, 4]}
        assert "test has no image of covid" in capsys.readouterr().err
        tree(tmp_path / "photos", ("test",), ("covd",), each=1)
        with pytest.raises(UsageError, match="photos/train: no folder covd, which test has; write names alike"):
            loaded(tmp_path / "photos")
