"""Names and options to a population: a user's own pieces, checks without loading, and the population_hash."""

import dataclasses
import textwrap

import numpy as np
import pytest

from rayfed.core.errors import UsageError
from rayfed.core.registry import resolve
from rayfed.data.dataset import Dataset
from rayfed.data.loading import build_data, load
from rayfed.data.partitions import PARTITIONS
from rayfed.data.population import population_hash
from rayfed.data.sets import DATASETS

OWN = """
    from dataclasses import dataclass
    import numpy as np
    from rayfed.data.dataset import Dataset
    from rayfed.data.population import Examples
    from rayfed.data.population import TestSet
    from rayfed.core.options import option

    @dataclass(frozen=True)
    class Lines:
        slope: float = option(2.0, above=0, help="of the line")
        default_partition = "iid"
        partition_defaults = {"clients": 4}

        def load(self):
            x = np.arange(40, dtype=np.float32)[:, None]
            return Dataset.of("lines", x, (x[:, 0] * self.slope > 30))

    @dataclass(frozen=True)
    class Faulty:
        def load(self):
            return Dataset.of("bytes", np.zeros((40, 3), np.uint8), np.arange(40) % 2)

    @dataclass(frozen=True)
    class Chosen:
        what: str = "good"

        def split(self, dataset):
            rows, none = np.arange(40), np.arange(0)
            return {
                "good": [(0, "a", rows[:20], rows[20:], none), ],
                "shared": [(0, "a", rows, none, none), (1, "b", rows[:1], none, none)],
                "empty": [(0, "a", none, rows, none)],
            }[self.what]

    def function():
        pass
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "my_lines.py").write_text(textwrap.dedent(OWN))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def test_every_name_in_the_tables_is_found_and_every_option_explained():
    for table, where in ((DATASETS, "data"), (PARTITIONS, "partition")):
        for name in table:
            for field in dataclasses.fields(resolve(name, table, where=where)):
                assert not field.init or field.metadata["help"], (name, field.name)


def test_own_dataset_and_partition(own):
    population = load("my_lines:Lines", {"slope": 1})
    assert [len(client.train) + len(client.val) + len(client.test) for client in population.clients] == [10] * 4
    assert population.num_classes == 2
    population = load("my_lines:Lines", {}, "my_lines:Chosen")
    assert [len(part) for part in (population.clients[0].train, population.clients[0].val)] == [20, 20]
    assert load("mini_digits", {}, "my_lines:Chosen").name == "mini_digits"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("Lines", {}, "my_lines:Chosen", {"what": "shared"}), "row 0 of lines is in 2 parts"),
        (("Lines", {}, "my_lines:Chosen", {"what": "empty"}), r"client 0 \(a\) of lines has no training examples"),
        (("Faulty", {}, "iid"), r"^data.name=my_lines:Faulty: images: uint8 \[40, 3\]; uint8 is for images"),
    ],
)
def test_own_datasets_and_partitions_are_held_to_the_rules(own, arguments, words):
    name, *others = arguments
    with pytest.raises(UsageError, match=words):
        load(f"my_lines:{name}", *others)


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (np.array([[0, np.inf]] * 4), "4 of 4 labels hold NaN or infinity"),
        (np.array(list("abab")), r"labels are <U1 \[4\]; expected integers \[N\]"),
    ],
)
def test_labels_that_are_no_classes_are_refused(labels, words):
    with pytest.raises(UsageError, match=f"^dataset own: {words}"):
        Dataset.of("own", np.zeros((4, 3), np.float32), labels)
    assert Dataset.of("own", np.zeros((4, 3), np.float32), np.array([0.0, 1, 2, 0])).labels.dtype == np.int64


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("mini_digit",), "data.name=mini_digit: did you mean mini_digits"),
        (("mini_digits", {"sed": 1}), "data.sed: no such key; did you mean data.seed"),
        (("mini_digits", {}, "dirichle"), "partition.name=dirichle: did you mean dirichlet"),
        (("mini_digits", {}, "dirichlet", {"alpha": -1}), "partition.alpha=-1.*more than 0"),
        (("mini_digits", {}, None, {"alpha": 1}), "partition.alpha: no such key"),
        (("mini_digits", {}, "file"), "partition.file: required"),
        (("my_lines:function",), "expected a dataclass with a method load"),
        (("my_lines:Chosen",), "expected a dataclass with a method load"),
        (("mnist", {"mean": [0.1, 0.2]}), r"data.mean=\[0.1, 0.2\]: expected 1 numbers"),
    ],
)
def test_check_finds_wrong_names_and_options_without_loading(own, arguments, words):
    with pytest.raises(UsageError, match=words):
        build_data(*arguments)


def test_fingerprint_follows_every_byte():
    options = {"per_domain": 20}
    first = load("mini_digits", options, leave_out="font")
    assert population_hash(first) == population_hash(load("mini_digits", options, leave_out="font"))
    assert population_hash(first) != population_hash(load("mini_digits", options, None, {"seed": 1}, "font"))
    before = population_hash(first)
    first.tests[0].examples.x[0, 0, 0, 0] ^= 1
    assert population_hash(first) != before
    first.tests[0].examples.x[0, 0, 0, 0] ^= 1
    first.clients[3].val.y[0] = 1 - first.clients[3].val.y[0]
    assert population_hash(first) != before
