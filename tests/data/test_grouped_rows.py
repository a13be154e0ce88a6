"""Patients with several rows: `data.group` keeps the rows of one in one part, in every partition."""

import numpy as np
import pandas as pd
import pytest

from rayfed.core.errors import UsageError
from rayfed.data.loading import load_partitioned
from rayfed.experiments.config import Config
from rayfed.experiments.plan import make_plan

SITES = {"large": 60, "small": 8}


@pytest.fixture
def visits(tmp_path):
    """A table in which patient p of a site has 1 + p % 3 rows, and every fourth patient is ill."""
    tables = []
    for site, patients in SITES.items():
        numbers = np.arange(patients)
        patient = np.repeat(numbers, 1 + numbers % 3)
        ill = np.where(patient % 4 == 0, "ill", "healthy")
        names = [f"{site}-{number}" for number in patient]
        tables.append(pd.DataFrame({"x": patient * 0.1, "y": ill, "site": site, "patient": names}))
    table = pd.concat(tables).sample(frac=1, random_state=0)
    table.to_csv(tmp_path / "visits.csv", index=False)
    return {"file": str(tmp_path / "visits.csv"), "features": ["x"], "label": "y", "group": "patient"}


def of_patients(options, clients):
    """The patients of each part of each client, as sets of names."""
    patient = pd.read_csv(options["file"])["patient"].to_numpy()
    return [[set(patient[rows]) for rows in client[2:]] for client in clients]


@pytest.mark.parametrize(
    ("roles", "partition", "chosen"),
    [
        ({"client": "site"}, None, {}),
        ({"client": "site"}, "natural", {"test": 0.4, "seed": 3}),
        ({"domain": "site"}, None, {}),
        ({"domain": "site"}, "domains", {"test": 0.3, "clients_per_domain": 2}),
        ({}, None, {"clients": 3}),
        ({}, "dirichlet", {"clients": 3, "alpha": 1.0}),
    ],
)
def test_a_patient_is_in_one_part_alone(visits, roles, partition, chosen):
    dataset, clients = load_partitioned("csv", visits | roles, partition, chosen)
    parts = of_patients(visits, clients)
    flat = [patients for client in parts for patients in client]
    assert sum(map(len, flat)) == len(set().union(*flat)) == sum(SITES.values())
    held = np.concatenate([rows for client in clients for rows in client[2:]])
    assert sorted(held.tolist()) == list(range(len(dataset)))


@pytest.mark.parametrize("role", ["client", "domain"])
def test_each_site_tests_a_quarter_of_its_patients_with_the_classes_in_proportion(visits, role):
    _, clients = load_partitioned("csv", visits | {role: "site"})
    for site, (train, val, test) in zip(SITES, of_patients(visits, clients), strict=True):
        patients = SITES[site]
        ill = {f"{site}-{number}" for number in range(0, patients, 4)}
        assert len(test) == patients // 4  # 15 and 2
        assert len(val) == (patients - patients // 4) // 10  # 4 and 0
        assert len(test & ill) == max(1, round(patients / 16))  # 3.75 and 0.5
        assert train & ill


def test_a_row_alone_is_divided_as_without_groups(visits):
    """Groups of one row change nothing, whether clients or domains hold the rows."""
    table = pd.read_csv(visits["file"])
    table["patient"] = np.arange(len(table))
    table.to_csv(visits["file"], index=False)
    for role in ("client", "domain"):
        without = visits | {role: "site", "group": None}
        for one, other in zip(
            load_partitioned("csv", visits | {role: "site"})[1], load_partitioned("csv", without)[1], strict=True
        ):
            assert [rows.tolist() for rows in one[2:]] == [rows.tolist() for rows in other[2:]]


def test_the_plan_says_it(visits):
    plan = make_plan(Config.read({"data": visits | {"name": "csv", "client": "site"}, "model.name": "mlp"}))
    assert plan.population.test_source == "tested on 0.25 of their rows, in whole groups"


def test_a_number_that_two_sites_give_is_refused(visits):
    table = pd.read_csv(visits["file"])
    table["patient"] = table["patient"].str.rpartition("-")[2]
    table.to_csv(visits["file"], index=False)
    message = (
        r"^partition=natural: the group of row \d+ has rows of (large and small|small and large), and 8 groups have "
        r"rows of several clients; write the client into the group's name if these are not the same patients"
    )
    with pytest.raises(UsageError, match=message):
        load_partitioned("csv", visits | {"client": "site"})


def test_a_split_that_divides_a_patient_is_refused(visits):
    table = pd.read_csv(visits["file"])
    table["part"] = "train"
    table.loc[table.index[table["patient"] == "large-2"][:1], "part"] = "test"
    table.to_csv(visits["file"], index=False)
    message = r"^data.group=patient: large-2 has rows in train and test; give them one split$"
    with pytest.raises(UsageError, match=message):
        load_partitioned("csv", visits | {"client": "site", "split": "part"})
