"""Heart Disease: UCI's files as they are published, and FLamby's preparation of them, computed here by pandas."""

import hashlib
from importlib.resources import files

import numpy as np
import pandas as pd
import pytest

from rayfed.cli.main import main
from rayfed.core.errors import UsageError
from rayfed.data.loading import load
from rayfed.data.sets import heart_disease
from rayfed.data.sets.heart_disease import HeartDisease

FOLDER = files("rayfed.data") / "heart_disease"
MD5 = {
    "cleveland": "2d91a8ff69cfd9616aa47b59d6f843db",
    "hungarian": "22e96bee155b5973568101c93b3705f6",
    "switzerland": "9a87f7577310b3917730d06ba9349e20",
    "va": "4249d03ca7711e84f4444768c9426170",
}
TRAINED_AND_TESTED = {"cleveland": (199, 104), "hungary": (172, 89), "switzerland": (30, 16), "long_beach": (85, 45)}


def hospital(name):
    table = pd.read_csv(FOLDER / f"processed.{name}.data", header=None, na_values="?")
    return table.drop(columns=[10, 11, 12]).dropna()


@pytest.mark.parametrize(("name", "expected"), MD5.items())
def test_the_files_are_those_of_uci(name, expected):
    content = (FOLDER / f"processed.{name}.data").read_bytes()
    assert hashlib.md5(content).hexdigest() == expected
    assert expected in (FOLDER / "README.md").read_text()


def test_hospitals_have_the_patients_that_flamby_counts():
    dataset = HeartDisease().load()
    counts = {
        name: tuple(int(((dataset.domain == place) & (dataset.is_test == tested)).sum()) for tested in (False, True))
        for place, name in enumerate(dataset.domains)
    }
    assert counts == TRAINED_AND_TESTED
    assert np.bincount(dataset.labels).tolist() == [357, 383]


def test_inputs_are_standardised_by_the_hospitals_own_training_patients():
    dataset = HeartDisease().load()
    tables = pd.concat([hospital(name) for name in MD5], keys=range(4))
    inputs = pd.get_dummies(tables.drop(columns=13), columns=[2, 6], drop_first=True).astype(float)
    for place in range(4):
        rows = dataset.domain == place
        own = inputs.loc[place]
        assert dataset.index[rows].tolist() == own.index.tolist()
        trained = own[~dataset.is_test[rows]]
        expected = (own - trained.mean()) / trained.std().replace(0, 1)
        np.testing.assert_allclose(dataset.images[rows], expected, atol=2e-5)
        assert dataset.labels[rows].tolist() == (tables.loc[place][13] > 0).astype(int).tolist()


def test_test_patients_have_the_classes_of_their_hospital_where_each_has_three_patients():
    dataset = HeartDisease().load()
    for place in (0, 1, 3):
        shares = [dataset.labels[(dataset.domain == place) & (dataset.is_test == t)].mean() for t in (False, True)]
        assert shares[0] == pytest.approx(shares[1], abs=0.01)
    assert heart_disease.drawn_tests(np.ones(10, int)).sum() == 4


def test_inputs_may_be_standardised_by_all_training_patients_or_stay_as_they_are():
    plain = HeartDisease(standardize="none").load()
    assert plain.images[0].tolist() == pytest.approx([63, 1, 145, 233, 1, 150, 0, 2.3, 0, 0, 0, 0, 1])
    pooled = HeartDisease(standardize="pooled").load()
    trained = pooled.images[~pooled.is_test].astype(float)
    np.testing.assert_allclose(trained.mean(0), 0, atol=1e-6)
    np.testing.assert_allclose(trained.std(0, ddof=1), 1, atol=1e-6)


def test_hospitals_can_be_chosen_and_left_out():
    population = load("heart_disease", {"domains": ["hungary", "cleveland"]}, leave_out="cleveland")
    assert [client.domain for client in population.clients] == ["hungary"]
    assert len(population.tests[0].examples) == 303
    with pytest.raises(UsageError, match=r"data\.domains=budapest: no such domain"):
        HeartDisease(domains=["budapest"])


def test_a_damaged_file_is_refused(tmp_path, monkeypatch):
    (tmp_path / "processed.cleveland.data").write_text("1,2,3\n4,5,6\n")
    monkeypatch.setattr(heart_disease, "FOLDER", tmp_path)
    with pytest.raises(UsageError, match=r"processed\.cleveland\.data: .*not lines of 14 numbers"):
        HeartDisease().load()


def test_the_command_says_whose_the_data_are(capsys):
    assert main(["data", "heart_disease"]) == 0
    assert "CC BY 4.0; Janosi, Steinbrunn, Pfisterer and Detrano 1988" in capsys.readouterr().out
    assert main(["data"]) == 0
    assert "heart_disease comes with rayfed, under its own licence: CC BY 4.0" in capsys.readouterr().out


def test_inputs_may_be_scaled_by_fixed_numbers_that_are_of_no_patients():
    plain = HeartDisease(standardize="none").load().images.astype(float)
    fixed = HeartDisease(standardize="fixed").load().images
    # age, sex, pressure, cholesterol, sugar, pulse, angina, depression, chest pain 2 to 4, ECG 1 and 2
    shift = np.array([50, 0.5, 130, 200, 0.5, 150, 0.5, 1, *[0.5] * 5])
    scale = np.array([10, 0.5, 20, 100, 0.5, 25, 0.5, 1, *[0.5] * 5])
    np.testing.assert_allclose(fixed, (plain - shift) / scale, atol=1e-6)
    assert abs(fixed.mean(0)).max() < 1.2
