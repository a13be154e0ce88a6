"""The HTML page: what is in it, that it needs no network, that it can repeat trials, and what a real browser shows."""

import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from small_results import add

import rayfed
from rayfed.core.round_record import MapPoint, RepresentationMap
from rayfed.experiments.config import Config
from rayfed.experiments.plan_identity import trial_name
from rayfed.records.files import write_holdings, write_map
from rayfed.records.storage import open_storage
from rayfed.records.trials import record_trial
from rayfed.reports.page import configurations, write_page
from rayfed.reports.read import read

HOSTILE = "</script><img src=x onerror=alert(1)>"
MEANS = {("fedavg", None): 0.5, ("fedprox", 0.1): 0.6, ("fedprox", 1.0): 0.7}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("page")
    for (algorithm, mu), mean in MEANS.items():
        for seed in range(3):
            values = {} if mu is None else {"algorithm.mu": mu}
            if mu == 0.1 and seed == 0:
                values |= {"partition_hash": "p0", "partition_seed": 0}
            add(home, f"{algorithm}{mu}{seed}", algorithm, seed, mean + seed / 50 + (mu or 0) * seed / 100, **values)
    failed = {"status": "failed", "error": f"ValueError: {HOSTILE}", "rounds": 2, "traceback": "at x"}
    record_trial(home, "e", "dbe0", {"algorithm": "dbe", "seed": 0, **failed})
    storage = open_storage(home).child("e")
    write_holdings(storage, "p0", [(0, "a", "train", 0, 5), (1, "b", "train", 1, 7), (0, "a", "val", 1, 1)])
    points = [MapPoint(0, "a", 7, -2.0, 4.0), MapPoint(1, "b", 3, 6.0, 1.0)]
    of_points = RepresentationMap("tsne", "global", "test", "features", points)
    write_map(storage.child("maps"), "fedprox0.10", 2, of_points)
    return home


@pytest.fixture(scope="module")
def page(folder: Path) -> str:
    write_page(folder, None, folder / "page.html")
    return (folder / "page.html").read_text(encoding="utf-8")


class Tables(HTMLParser):
    """The cells of each table of results as text."""

    def __init__(self, page: str):
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self._open = False
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag == "table":
            self._open = ("class", "results") in attributes
            self.tables += [[]] * self._open
        elif self._open and tag == "tr":
            self.tables[-1] = [*self.tables[-1], []]
        elif self._open and tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._open = self._open and tag != "table"

    def handle_data(self, data: str) -> None:
        if self._open and self.tables[-1] and self.tables[-1][-1]:
            self.tables[-1][-1][-1] = " ".join(f"{self.tables[-1][-1][-1]} {data}".split())


class TestContent:
    def test_the_answer_comes_first(self, page: str) -> None:
        """AVG with its p-value stands before the domains; a method without a value says that it failed."""
        table = Tables(page).tables[0]
        assert table[0] == ["method", "AVG", "p against fedprox", "a", "b"]
        assert table[3][:2] == ["fedprox mu=1 †", "75.00 ± 3.00"]
        assert 0 < float(table[1][2]) < 0.01
        assert table[-1] == ["dbe 1 of 1 failed", ""]
        (view, *_) = re.findall('<section class="view"(.*?)>', page)
        assert 'data-metric="accuracy" data-split="test"' in view

    def test_nothing_is_loaded_and_no_result_becomes_markup(self, page: str) -> None:
        assert f"ValueError: {html.escape(HOSTILE)}" in page
        assert "<pre>at x</pre>" in page
        written = re.sub(r"<script.*?</script>", "", page, flags=re.S)
        assert not re.search(r"(?:src|href)=[\"'](?!data:)|@import|url\(", written)
        assert HOSTILE not in page
        assert "default-src 'none'" in page


class TestRepeating:
    def test_a_configuration_names_the_same_trial(self, here: Path) -> None:
        """Beside a trial with other keys, so that the table has gaps."""
        common = {
            "data": {"domains": ["plain", "font"], "per_domain": 40},
            "model": {"name": "mlp", "hidden": [8]},
            "rounds": 1,
            "local": {"batch_size": 4, "lr": 1.0},
            "evaluate.splits": ["val", "test"],
            "metrics.ece": {"bins": 10},
        }
        iid = {"partition": {"name": "iid", "clients": 2}, "cohort_share": 1.0, "seed": 2}
        trials = [
            rayfed.run({**common, **more}, keep_state=False).trial
            for more in ({"algorithm.name": "fedprox", "algorithm.mu": 0.5, "cohort": 1}, iid)
        ]
        texts = [one["yaml"] for one in configurations(read("results"))]
        written = [yaml.safe_load(text) for text in texts]
        assert {trial_name(Config.read(values)) for values in written} == set(trials)
        assert "# rayfed run FILE.yaml seed=N; seeds of this table: 2." in texts[0]


_WATCH = """<script>window.report = { errors: [] };
addEventListener("error", (event) => report.errors.push(event.message));
addEventListener("securitypolicyviolation", (event) => report.errors.push(event.blockedURI));</script>"""
_DRIVE = """<script type="module">
const texts = (list) => [...list].map((one) => one.textContent.replace(/\\s+/g, " ").trim());
const view = () => document.querySelector(".view:not([hidden])");
const rows = () => texts(view().querySelector(".results").querySelectorAll("tbody tr:not([hidden]) th"));
const settled = () => new Promise((done) => setTimeout(done, 500));
const legend = () => texts(view().querySelector("figure svg.marks").querySelectorAll(".role-legend-label text"));
const choose = async (id, value) => { const input = document.getElementById(id);
  input[input.type === "checkbox" ? "checked" : "value"] = value;
  input.dispatchEvent(new Event("input", { bubbles: true })); await settled(); };
await settled();
Object.assign(report, { rows: rows(), legend: legend(), drawn: document.querySelectorAll("figure svg.marks").length,
  wide: document.documentElement.scrollWidth > innerWidth });
await choose("find", "fedprox"); report.found = rows(); report.foundLegend = legend();
await choose("chosen", true); report.chosen = rows(); report.chosenLegend = legend();
await choose("metric", "loss"); report.loss = view().dataset.metric; report.lossDrawn = legend();
await choose("find", ""); await choose("chosen", false);
view().querySelectorAll(".results th")[1].click(); report.sorted = rows();
const told = Object.assign(document.createElement("pre"), { id: "report", textContent: JSON.stringify(report) });
document.body.replaceChildren(told);
</script>"""


def browser() -> str:
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("needs Chromium, such as Debian's package chromium")
    return found


def browse(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--enable-logging=stderr"]
    profile = f"--user-data-dir={path.parent / 'profile'}"
    command = [browser(), *flags, profile, "--virtual-time-budget=5000", *arguments, path.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)


@pytest.fixture(scope="module")
def seen(page: str, folder: Path) -> dict:
    """What a browser shows, after each of several choices."""
    path = folder / "driven.html"
    path.write_text(_DRIVE.join(page.replace("<head>", f"<head>{_WATCH}", 1).rsplit("</body>", 1)), "utf-8")
    done = browse(path, "--dump-dom")
    assert "Uncaught" not in done.stderr
    (report,) = re.findall(r'<pre id="report">(.*?)</pre>', done.stdout, re.S)
    return json.loads(html.unescape(report))


@pytest.mark.slow
class TestBrowser:
    def test_charts_are_drawn_without_errors(self, seen: dict) -> None:
        assert seen["errors"] == []
        assert seen["drawn"] == 7  # curves, bytes, sensitivity, clients, map, time and partition
        assert seen["legend"] == ["fedavg", "fedprox mu=0.1", "fedprox mu=1"]
        assert not seen["wide"]

    def test_filters_reach_tables_and_charts(self, seen: dict) -> None:
        assert seen["found"] == ["fedprox mu=0.1", "fedprox mu=1 †"]
        assert seen["foundLegend"] == ["fedprox mu=0.1", "fedprox mu=1"]
        assert seen["chosen"] == ["fedprox mu=1 †"]
        assert seen["chosenLegend"] == ["fedprox mu=1"]
        assert (seen["loss"], seen["lossDrawn"]) == ("loss", ["fedprox mu=1"])

    def test_a_click_on_a_header_sorts(self, seen: dict) -> None:
        assert seen["sorted"][:3] == ["fedavg", "fedprox mu=0.1", "fedprox mu=1 †"]  # by loss, the greatest first
