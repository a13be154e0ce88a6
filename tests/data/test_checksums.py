"""Files that are not those that were published: one line each, once, and no error."""

import re

from helpers import image_sets
from helpers.published_data import needs
from rayfed.data.loading import load
from rayfed.data.sets.mnist import IDX_FILES, Mnist


def told(capsys):
    """The names of the files that lines complain of."""
    lines = [line for line in capsys.readouterr().err.splitlines() if "md5" in line]
    return [re.search(r"^rayfed: .*/([^/]+): md5 [0-9a-f]{32}, but the published file has", line)[1] for line in lines]


def test_sets_of_arrays_are_compared_too(tmp_path, capsys):
    image_sets.digits5(tmp_path)
    image_sets.cifar10(tmp_path)
    for start in range(2):
        load("digits5", {"root": str(tmp_path)})
        load("cifar10", {"root": str(tmp_path)}, "iid", {"clients": 2})
        names = ["train_32x32.mat", "test_32x32.mat", "usps.bz2", "usps.t.bz2"]
        names += [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
        assert told(capsys) == ([] if start else names)


@needs("MNIST/raw")
def test_the_real_files_are_packed_anew(capsys):
    """Those of t10k hold the original bytes, but not in the original .gz files."""
    Mnist().load()
    load("digits5", {"domains": ["mnist"]})
    assert sorted(told(capsys)) == sorted(f"{file}.gz" for file in IDX_FILES)
