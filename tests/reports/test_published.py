"""Published values in a search space and in reports, against values computed here."""

import json

import numpy as np
import pytest
from scipy import stats

from rayfed.cli.main import main
from rayfed.core.errors import UsageError
from rayfed.experiments.space import configurations, read_space
from rayfed.records.published import FILE
from rayfed.reports.published import interval, overlap
from rayfed.reports.tables import Cell

SPACE = {
    "experiment": "e",
    "seeds": [0, 1, 2],
    "search.max_concurrent": 1,
    "data.name": "heart_disease",
    "partition.validation": 0,
    "model": {"name": "mlp", "hidden": []},
    "rounds": 1,
    "published": {"source": "Somebody 2020", "where": "table 1", "seeds": 5},
    "arms": [
        {"algorithm.name": "fedavg", "published": {"AVG": [0.5, 0.1], "cleveland": 99}},
        {"algorithm": {"name": "fedprox", "mu": 0.1}},
    ],
}


def changed(**changes):
    return SPACE | changes


def arm(published, **more):
    return changed(arms=[{"algorithm.name": "fedavg", "published": published, **more}])


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The results of the sweep, run by the command, and what it printed last."""
    import yaml

    folder = tmp_path_factory.mktemp("published")
    (folder / "e.yaml").write_text(yaml.safe_dump(SPACE))
    assert main(["sweep", str(folder / "e.yaml"), f"results={folder / 'r'}"]) == 0
    return folder / "r"


def report(results, capsys, *options):
    capsys.readouterr()
    assert main(["report", str(results), *options]) == 0
    return capsys.readouterr().out


def test_published_values_stand_in_brackets_beside_ours(results, capsys):
    table = report(results, capsys, "--format", "markdown")
    rows = {line.split(" | ")[0].strip("| "): line for line in table.splitlines() if line.startswith("| fed")}
    fedavg = next(line for name, line in rows.items() if name.startswith("fedavg"))
    fedprox = next(line for name, line in rows.items() if name.startswith("fedprox"))
    assert fedavg.count("[") == 2
    assert "[99.00]" in fedavg
    assert "[0.50 ± 0.10]" in fedavg
    assert "[" not in fedprox


def test_the_last_line_counts_the_intervals_that_overlap(results, capsys):
    text = " ".join(report(results, capsys).split())
    assert "In brackets: Somebody 2020, table 1, 5 seeds." in text
    assert "The 95 % intervals of the means (t, over seeds) overlap in 0 of 2 values, not in fedavg cleveland" in text


def test_other_metrics_have_no_published_values(results, capsys):
    assert "Somebody" not in report(results, capsys, "--metric", "loss")


def test_latex_and_the_page_show_them_too(results, capsys, tmp_path):
    assert r"[0.50 $\pm$ 0.10]" in report(results, capsys, "--format", "latex")
    report(results, capsys, "--html", str(tmp_path / "p.html"))
    page = (tmp_path / "p.html").read_text()
    assert '<span class="soft">[0.50 ± 0.10]</span>' in page
    assert "Somebody 2020" in page


def test_a_damaged_file_of_published_values_is_left_out(results, capsys):
    content = (results / "e" / FILE).read_text()
    try:
        for text in ("{", "[]", '{"values": [{}]}', json.dumps({"values": 3})):
            (results / "e" / FILE).write_text(text)
            assert "Somebody" not in report(results, capsys)
    finally:
        (results / "e" / FILE).write_text(content)


def test_a_command_that_changes_the_configuration_is_named():
    space = read_space(SPACE, {"rounds": 3, "seeds": [0], "results": "r", "placement.threads": 2})
    assert space.published.changed == ("rounds",)
    assert read_space(SPACE).published.changed == ()
    assert read_space(SPACE, {"data.root": "elsewhere", "data.download": False}).published.changed == ()


def test_values_belong_to_the_trials_of_their_arm():
    from rayfed.experiments.plan_identity import trial_name
    from rayfed.experiments.published import trials_by_arm

    space = read_space(changed(arms=[{"local.lr": {"grid": [0.1, 0.2]}}, *SPACE["arms"]]))
    configs = configurations(space)
    trials = trials_by_arm(space.arms, [trial_name(config) for config in configs])
    assert [len(trials[number]) for number in range(3)] == [6, 3, 3]
    (value, _) = space.published.of_trials(trials).values
    own = [trial_name(c) for c in configs if c.algorithm_name == "fedavg" and c.local.lr == 0.01]
    assert list(value.trials) == own


@pytest.mark.parametrize(("seeds", "sd"), [(5, 0.3), (10, 2.0), (2, 0.1)])
def test_intervals_are_those_of_scipy(seeds, sd):
    expected = stats.t.interval(0.95, seeds - 1, loc=3.0, scale=sd / np.sqrt(seeds))
    assert interval(3.0, sd, seeds) == pytest.approx(expected)


def test_means_without_a_known_error_are_points():
    assert interval(3.0, None, 5) == interval(3.0, 1.0, 1) == (3.0, 3.0)
    cell = Cell(mean=3.0, sd=1.0, decimals=2, seeds=5)  # 3 ± 1.24
    close, far = (Cell(**vars(cell) | {"published": (value, None)}) for value in (4.2, 4.3))
    assert overlap(close, 1)
    assert not overlap(far, 1)


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (changed(published=None), r"^published: expected a mapping with the source of the values"),
        (changed(published={"where": "x"}), r"^published.source: required"),
        (changed(published={"source": "x", "seed": 3}), r"^published.seed: no such key; did you mean published.seeds"),
        (changed(published={"source": "x", "seeds": 0}), r"^published.seeds=0: "),
        (changed(arms=[{"algorithm.name": "fedavg"}]), r"^published: no arm has values"),
        (arm({}), r"^arms\[0\].published=\{\}: expected values by column"),
        (arm({"AVG": "81"}), r"^arms\[0\].published.AVG='81': expected a number, or \[mean, sd\]$"),
        (arm({"AVG": [1, 2, 3]}), r"^arms\[0\].published.AVG=\[1, 2, 3\]: expected a number, or \[mean, sd\]$"),
        (arm({"AVG": [1, -2]}), r"^arms\[0\].published.AVG=\[1, -2\]: the standard deviation is negative$"),
        (
            arm({"AVG": 1}, **{"local.lr": {"grid": [0.1, 0.2]}}),
            r"^arms\[0\].published: the arm has 2 configurations; give each an arm of its own$",
        ),
    ],
)
def test_what_cannot_be_read_is_refused(space, message):
    with pytest.raises(UsageError, match=message):
        read_space(space)


def test_a_column_that_the_report_cannot_have_is_refused(tmp_path):
    import rayfed

    space = arm({"AVG": 1, "clevland": 2}) | {"results": str(tmp_path)}
    message = r"^arms\[0\].published.clevland: the report has no such column; did you mean cleveland\?"
    with pytest.raises(UsageError, match=message):
        rayfed.sweep(space, quiet=True)


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ("auroc", r"^published.metric=auroc: is not measured; add metrics.auroc=true to the search space$"),
        ("acuracy", r"^published.metric=acuracy: is not measured; did you mean accuracy\?"),
    ],
)
def test_a_metric_that_is_not_measured_is_refused(tmp_path, metric, message):
    import rayfed

    space = changed(published=SPACE["published"] | {"metric": metric}, results=str(tmp_path))
    with pytest.raises(UsageError, match=message):
        rayfed.sweep(space, quiet=True)


def test_a_single_run_refuses_the_key():
    from rayfed.experiments.config import Config

    with pytest.raises(UsageError, match="published: a key of search spaces, which rayfed sweep runs"):
        Config.read({"published": {"source": "x"}})
