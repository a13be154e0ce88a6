"""Charts of privacy, compression, attacks and robust rules: that each shows the numbers of the tables."""

import io
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from helpers.score_rows import row, trial_writer, write
from rayfed.core.errors import UsageError
from rayfed.records.trials import record_trial
from rayfed.reports.charts import chart_data, draw
from rayfed.reports.charts.chart import Chart, image_bytes, styled
from rayfed.reports.page import page_html
from rayfed.reports.read import read


def add(folder: Path, name: str, accuracy: float, *, algorithm: str = "fedavg", seed: int = 0, **given: Any) -> None:
    """Add a trial of two rounds; `epsilon` and `bytes_up` are those of a round, the rest is its configuration."""
    values = {key.replace("__", "."): value for key, value in given.items() if key not in ("epsilon", "bytes_up")}
    record_trial(folder, "e", name, {"algorithm": algorithm, "seed": seed, "status": "done", "rounds": 2, **values})
    epsilon = given.get("epsilon")
    with trial_writer(folder, name, algorithm=algorithm, seed=seed) as writer:
        for number in (1, 2):
            value = accuracy - 0.1 * (2 - number)
            scores = [row(number, 0, "a", split, "global", "accuracy", value, 10) for split in ("val", "test")]
            spent = None if epsilon is None else epsilon * number
            write(writer, scores, bytes_up={"weights": given.get("bytes_up", 10**6)}, epsilon=spent)


def chart_of(kind: str, folder: Path) -> Chart:
    return draw(kind, chart_data(read(folder)))


def rows_of(spec: dict[str, Any]) -> pd.DataFrame:
    return pd.read_csv(io.StringIO(spec["data"]["values"]), keep_default_na=False, dtype={"line": str})


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("private")
    for algorithm, gain in (("fedavg", 0.0), ("scaffold", 0.05)):
        common = {"algorithm": algorithm, "privacy__name": "gaussian"}
        for seed in (0, 1):
            add(folder, f"{algorithm}{seed}", 0.8 + gain, seed=seed, privacy__sigma=0.0, **common)
            for epsilon in (0.5, 8.0):
                accuracy = 0.6 + 0.01 * epsilon + gain + 0.02 * seed
                values = {"privacy__epsilon": epsilon, "epsilon": epsilon / 2}
                add(folder, f"{algorithm}{epsilon}{seed}", accuracy, seed=seed, **values, **common)
    return folder


def test_the_budget_is_that_of_all_rounds(private: Path) -> None:
    chart = chart_of("privacy", private)
    rows = rows_of(styled(chart.chart))
    assert set(rows["line"]) == {"fedavg", "scaffold"}
    spent = rows[rows["private"] == 1].set_index("line")
    assert spent.loc["fedavg", "x"].astype(float).tolist() == [0.5, 8.0]
    assert spent.loc["fedavg", "y"].tolist() == pytest.approx([61.5, 69.0])
    without = rows[rows["private"] == 0].set_index("line")["y"]
    assert without.to_dict() == pytest.approx({"fedavg": 80.0, "scaffold": 85.0})
    assert chart.caption.endswith("± 1 sd over 2 seeds; dotted: without a guarantee")


def test_other_keys_part_lines(tmp_path: Path) -> None:
    for clip in (0.1, 1.0):
        for epsilon in (1.0, 2.0):
            values = {"privacy__clip": clip, "privacy__epsilon": epsilon, "epsilon": epsilon / 2}
            add(tmp_path, f"{clip}{epsilon}", 0.5, **values)
    rows = rows_of(styled(chart_of("privacy", tmp_path).chart))
    assert rows.groupby("line")["x"].apply(list).to_dict() == {
        "fedavg privacy.clip=0.1": [1.0, 2.0],
        "fedavg privacy.clip=1": [1.0, 2.0],
    }


@pytest.fixture(scope="module")
def compressed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compressed")
    for seed in (0, 1):
        add(folder, f"whole{seed}", 0.8, seed=seed, compression__name="none", bytes_up=4 * 10**6)
        add(folder, f"short{seed}", 0.7, seed=seed, compression__name="sign", bytes_up=10**5)
    return folder


def test_uploads_add_up(compressed: Path) -> None:
    rows = rows_of(styled(chart_of("upload", compressed).chart)).set_index("line")
    assert rows["x"].to_dict() == {
        "fedavg, none": 0.008,
        "fedavg, sign": 0.0002,
    }
    assert rows["y"].tolist() == pytest.approx([80.0, 70.0])


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("attacked")
    attacks = ({"attack__name": "alie"}, {"attack__name": "scale", "attack__factor": 1.0})
    attacks += ({"attack__name": "scale", "attack__factor": 9.0},)
    for number, attack in enumerate(attacks):
        for place, rule in enumerate(("krum", "mean")):
            add(folder, f"{number}{rule}", 0.5 + number / 10 + place / 100, robust__name=rule, **attack)
    return folder


@pytest.fixture(scope="module")
def folders(private: Path, compressed: Path, attacked: Path) -> dict[str, Path]:
    """The results of each kind of chart."""
    return {"privacy": private, "upload": compressed, "attacks": attacked}


def test_attacks_and_rules(attacked: Path) -> None:
    (panel,) = styled(chart_of("attacks", attacked).chart)["concat"]
    assert panel["title"] == "fedavg"
    cells = rows_of(styled(chart_of("attacks", attacked).chart) | panel).set_index(["attack", "rule"])["y"]
    assert cells.to_dict() == pytest.approx(
        {
            ("alie", "krum"): 50.0,
            ("alie", "mean"): 51.0,
            ("scale factor=1", "krum"): 60.0,
            ("scale factor=1", "mean"): 61.0,
            ("scale factor=9", "krum"): 70.0,
            ("scale factor=9", "mean"): 71.0,
        }
    )


def test_each_method_has_a_panel(tmp_path: Path) -> None:
    for algorithm in ("fedavg", "scaffold"):
        for rule in ("mean", "median"):
            add(tmp_path, f"{algorithm}{rule}", 0.5, algorithm=algorithm, robust__name=rule)
    panels = styled(chart_of("attacks", tmp_path).chart)["concat"]
    assert [panel["title"] for panel in panels] == ["fedavg", "scaffold"]


def test_what_cannot_be_shown_is_refused(tmp_path: Path) -> None:
    add(tmp_path, "t", 0.5)
    for kind, message in (
        ("privacy", "^plot: no trial spent a privacy budget; privacy.epsilon or privacy.sigma gives one$"),
        ("upload", "^plot: clients of all methods sent equally much; compression.name changes that$"),
        ("attacks", "^plot: neither attack.name nor robust.name varies in these results$"),
    ):
        with pytest.raises(UsageError, match=message):
            chart_of(kind, tmp_path)


@pytest.mark.parametrize(
    ("kind", "heading"),
    [
        ("privacy", "Against the privacy budget of all rounds"),
        ("upload", "Against the bytes that clients sent in all rounds"),
        ("attacks", "Attacks and robust rules"),
    ],
)
def test_the_page_has_the_charts(kind: str, heading: str, folders: dict[str, Path]) -> None:
    folder = folders[kind]
    assert heading in page_html(folder)
    picture = image_bytes(chart_of(kind, folder), "svg").decode()
    assert "aria-roledescription" in picture  # of axes or marks: something was drawn


def test_noise_of_a_larger_deployment_is_noted(tmp_path: Path) -> None:
    add(tmp_path, "simulated", 0.5, privacy__noise_cohort=1000)
    add(tmp_path, "own", 0.6, algorithm="scaffold", privacy__noise_cohort=None)
    noted = (
        "e: noise and ε of fedavg are those of a deployment with cohorts of 1000 clients (privacy.noise_cohort). The "
        "cohorts of this simulation would need more noise."
    )
    assert noted in read(tmp_path).notes
