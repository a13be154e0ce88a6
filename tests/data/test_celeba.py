"""CelebA in its published form, with celebrities as clients."""

import numpy as np
import pytest

from helpers.image_sets import picture
from rayfed.core.errors import UsageError
from rayfed.data.loading import load

CELEBRITIES = (7, 3, 7, 9, 3, 7, 7, 7, 3, 3, 3, 9)  # of each photograph: five of 7, five of 3, and two of 9


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "celeba"
    attributes = [str(len(CELEBRITIES)), "Bald Smiling Young"]
    identities = []
    for number, celebrity in enumerate(CELEBRITIES, 1):
        file = f"{number:06}.jpg"
        picture(folder / "img_align_celeba" / file)
        smiles = 1 if number % 3 == 0 else -1
        attributes.append(f"{file} -1  {smiles}  1")
        identities.append(f"{file} {celebrity}")
    (folder / "list_attr_celeba.txt").write_text("\n".join(attributes) + "\n")
    (folder / "identity_CelebA.txt").write_text("\n".join(identities) + "\n")
    return tmp_path


def clients(root, partition=None, **options):
    return load(
        "celeba", {"root": str(root), "size": 8, **options}, None, {"validation": 0.0} | (partition or {})
    ).clients


def test_celebrities_with_five_photographs_are_clients(root):
    people = clients(root, {"test": 0.2})
    assert [(len(client.train), len(client.test)) for client in people] == [(4, 1), (4, 1)]
    assert people[0].train.x.shape[1:] == (3, 8, 8)
    labels = [np.concatenate([client.train.y, client.test.y]) for client in people]
    # photographs 3, 6, 9 and 12 smile: of celebrity 3, these have 2, 5, 9, 10, 11; of celebrity 7, 1, 3, 6, 7, 8
    assert [int(values.sum()) for values in labels] == [1, 2]


def test_another_attribute_and_fewer_photographs(root):
    assert [len(client.train) + len(client.test) for client in clients(root, least=2)] == [5, 5, 2]
    people = clients(root, attribute="Young", celebrities=1)
    assert len(people) == 1
    assert set(people[0].train.y.tolist()) == {1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attribute": "Smile"}, "data.attribute=Smile: no such attribute; did you mean Smiling"),
        ({"least": 6}, "data.least=6: no celebrity has as many photographs; the most is 5"),
    ],
)
def test_what_there_is_not_is_refused(root, options, message):
    with pytest.raises(UsageError, match=message):
        clients(root, **options)


def test_damaged_tables_are_refused(root):
    path = root / "celeba" / "list_attr_celeba.txt"
    path.write_text(path.read_text().replace("-1", "2"))
    with pytest.raises(UsageError, match=r"list_attr_celeba\.txt"):
        clients(root)


def test_a_photograph_without_a_celebrity_is_refused(root):
    path = root / "celeba" / "identity_CelebA.txt"
    path.write_text("\n".join(path.read_text().splitlines()[:-1]))
    with pytest.raises(UsageError, match=r"has no line for 000012\.jpg"):
        clients(root)


def test_what_is_missing_is_said(tmp_path):
    with pytest.raises(
        UsageError, match=r"list_attr_celeba\.txt, identity_CelebA\.txt and the folder img_align_celeba"
    ):
        clients(tmp_path)
