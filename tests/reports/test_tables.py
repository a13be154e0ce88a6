"""The tables of the report in each format: which columns they have, what is marked, and that LaTeX compiles."""

import shutil
import subprocess
from pathlib import Path

import pandas as pd
import pytest
from small_results import add

from rayfed.reports.formats import latex_table, markdown_table, text_table
from rayfed.reports.render import render
from rayfed.reports.summary import mean_caption
from rayfed.reports.tables import Stars, make_table


def rows(values: dict[str, dict[str, tuple[float, float]]], *, higher: bool = True, seeds: int = 3) -> pd.DataFrame:
    """Rows of a summary from mean and sd by method and quantity."""
    table = [
        (order, *name.partition(" ")[::2], quantity, mean, sd)
        for order, (name, of_method) in enumerate(values.items())
        for quantity, (mean, sd) in of_method.items()
    ]
    columns = ["order", "algorithm", "hyperparameters", "quantity", "mean", "sd"]
    return pd.DataFrame(table, columns=columns).assign(chosen=False, seeds=seeds, higher_is_better=higher)


TWO = {
    "fedavg": {"domain:a": (0.5, 0.1), "domain:b": (0.7, 0.1), "mean": (0.6, 0.05), "worst": (0.5, 0.1)},
    "dbe": {"domain:a": (0.8, 0.1), "domain:b": (0.6, 0.1), "mean": (0.7, 0.02), "worst": (0.6, 0.1)},
    "solo": {"domain:a": (0.4, 0.1), "domain:b": (0.7, 0.2), "mean": (0.55, 0.01), "worst": (0.4, 0.1)},
}
NAN = float("nan")


class TestColumns:
    def test_domains_mean_and_worst(self) -> None:
        """Domains that are named like other columns hide none."""
        table = make_table(rows(TWO), "accuracy")
        assert list(table.cells()) == ["a", "b", "AVG", "worst"]
        assert table.cells()["AVG"] == ["60.00 ± 5.00", "70.00 ± 2.00", "55.00 ± 1.00"]
        assert table.remarks == []
        named = {name: {**of, "domain:AVG": of["domain:a"], "domain:worst": of["mean"]} for name, of in TWO.items()}
        headers = list(make_table(rows(named), "accuracy").cells())
        assert headers == ["domain AVG", "a", "b", "domain worst", "AVG", "worst"]

    def test_one_domain_has_no_average(self) -> None:
        one = {name: {"domain:a": of["mean"], "mean": of["mean"], "worst": of["worst"]} for name, of in TWO.items()}
        assert list(make_table(rows(one), "accuracy").cells()) == ["a", "worst"]
        without = {name: {"mean": of["mean"], "worst": of["mean"]} for name, of in TWO.items()}
        assert list(make_table(rows(without), "accuracy").cells()) == ["AVG"]

    def test_a_worst_client_that_repeats_a_domain_is_named_in_a_remark_and_an_average_stays(self) -> None:
        equal = {"domain:a": (0.6, NAN), "domain:b": (0.6, NAN), "mean": (0.6, NAN), "worst": (0.6, NAN)}
        for values in ({"fedavg": TWO["fedavg"], "solo": TWO["solo"]}, {"fedavg": equal}):
            table = make_table(rows(values), "accuracy")
            assert list(table.cells()) == ["a", "b", "AVG"]
            assert table.remarks == ["worst: the same as a in every row."]


class TestMarks:
    def test_the_best_is_bold_and_the_second_underlined(self) -> None:
        code = latex_table(make_table(rows(TWO), "accuracy"), "100 % of a_b", "e: x")
        assert r"fedavg & \underline{50.00 $\pm$ 10.00} & \textbf{70.00 $\pm$ 10.00} & \underline" in code
        assert r"dbe & \textbf{80.00 $\pm$ 10.00} & \underline{60.00 $\pm$ 10.00} & \textbf" in code
        assert r"solo & 40.00 $\pm$ 10.00 & \textbf{70.00 $\pm$ 20.00} & 55.00 $\pm$ 1.00 & 40.00" in code
        assert r"\caption{100 \% of a\_b}" in code
        assert r"\label{tab:e-x}" in code

    def test_of_a_loss_the_lowest_is_best_and_one_method_is_not_marked(self) -> None:
        text = markdown_table(make_table(rows(TWO, higher=False), "loss"))
        assert "| solo | **0.4000 ± 0.1000** |" in text
        assert "**" not in markdown_table(make_table(rows({"dbe": TWO["dbe"]}), "accuracy"))

    def test_stars_stand_in_the_column_of_means(self) -> None:
        stars = Stars("dbe", "paired t", {0: "**", 2: ""})
        table = make_table(rows(TWO), "accuracy", stars)
        assert table.cells()["AVG"] == ["60.00 ± 5.00**", "70.00 ± 2.00", "55.00 ± 1.00"]
        assert "60.00 ± 5.00\\*\\*" in markdown_table(table)
        assert "$^{**}$" in latex_table(table, "c", "l")
        (fedavg, dbe) = [line for line in text_table(table, width=90).splitlines() if line.startswith(("fed", "dbe"))]
        assert fedavg.index("60.00 ± 5.00") == dbe.index("70.00 ± 2.00")  # numbers stay aligned


class TestWhatVaried:
    def trials(self, hashes: list[str | None]) -> pd.DataFrame:
        return pd.DataFrame({"order": 0, "seed": range(len(hashes)), "partition_hash": hashes, "leave_out": ""}).assign(
            clients_scored=None
        )

    def test_seeds_and_partitions(self) -> None:
        assert mean_caption(self.trials(["x", "y", "z"])) == "mean ± sd over 3 seeds, 3 partitions"
        assert mean_caption(self.trials(["x", "x", "x"])) == "mean ± sd over 3 seeds, 1 partition"
        assert mean_caption(self.trials(["x"])) == "1 seed, 1 partition"
        assert mean_caption(self.trials([None, None])) == "mean ± sd over 2 seeds"
        trials = self.trials(list("xyxy")).assign(seed=[0, 0, 1, 1], leave_out=["a", "b"] * 2)
        assert mean_caption(trials) == "mean ± sd over 2 seeds, 1 partition"  # left-out domains are no partitions


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("tables")
    for seed in (0, 1):
        add(home, f"a{seed}", "fedavg", seed, 0.5 + seed / 10)
        for mu in (0.1, 1.0):
            add(home, f"p{mu}{seed}", "fedprox", seed, 0.5 + mu / 10 + seed / 20, **{"algorithm.mu": mu})
    return home


class TestReport:
    def test_markdown(self, folder: Path) -> None:
        text = render(folder, format="markdown")
        assert "|  | a | b | AVG |\n| --- | ---: | ---: | ---: |\n| fedavg | 47.00 ± 7.07 |" in text
        assert "| fedprox mu=1 † | **54.50 ± 3.54** |" in text

    @pytest.mark.slow
    def test_latex_compiles(self, folder: Path, tmp_path: Path) -> None:
        if shutil.which("pdflatex") is None:
            pytest.skip("needs pdflatex and booktabs, such as Debian's texlive-latex-recommended")
        head, tail = "\\documentclass{article}\n\\usepackage{booktabs}\n\\begin{document}\n", "\n\\end{document}\n"
        (tmp_path / "t.tex").write_text(head + render(folder, format="latex") + tail)
        command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "t.tex"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, errors="replace", timeout=120)
        assert done.returncode == 0, done.stdout[-2000:]
        assert "Overfull" not in done.stdout
        assert (tmp_path / "t.pdf").read_bytes().startswith(b"%PDF")
