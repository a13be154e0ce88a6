"""The HTML page: what is in it, that it needs no network, that it can repeat trials, its server, and a real browser."""

import html
import http.client
import json
import re
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
import yaml
from small_results import add

import rayfed
from helpers.commands import command
from helpers.score_rows import row, write
from rayfed.core.errors import UsageError
from rayfed.core.records import MapPoint, Record, RepresentationMap
from rayfed.experiments.config import Config
from rayfed.experiments.naming import trial_name
from rayfed.records.holdings import write_holdings
from rayfed.records.maps import write_map
from rayfed.records.storage import open_storage
from rayfed.records.trials import record_trial
from rayfed.records.writer import TrialWriter
from rayfed.reports.page.build import write_page
from rayfed.reports.page.content import as_json, configurations, page_content
from rayfed.reports.page.server import LivePage, make_server
from rayfed.reports.read import read

main = command("report")
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
    failed = {
        "algorithm": "dbe",
        "seed": 0,
        "status": "failed",
        "error": f"ValueError: {HOSTILE}",
        "rounds": 2,
        "traceback": "at x",
    }
    record_trial(home, "e", "dbe0", failed)
    storage = open_storage(home).child("e")
    write_holdings(
        storage, "p0", [(0, "a", "train", 0, 5), (0, "a", "test", 1, 9), (1, "b", "train", 1, 7), (0, "a", "val", 1, 1)]
    )
    points = [MapPoint(0, "a", 7, -2.0, 4.0), MapPoint(1, "b", 3, 6.0, 1.0)]
    for number in (1, 2):
        write_map(
            storage.child("maps"),
            "fedprox0.10",
            number,
            RepresentationMap("tsne", "global", "test", "features", points),
        )
    return home


@pytest.fixture(scope="module")
def page(folder: Path) -> str:
    write_page(folder, None, folder / "page.html")
    return (folder / "page.html").read_text(encoding="utf-8")


def data_of(page: str) -> dict:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    return json.loads(text)


@pytest.fixture
def infinite(tmp_path: Path) -> Path:
    """Two methods, of which one has an infinite loss on one client."""
    for algorithm, loss in (("dbe", float("inf")), ("fedavg", 1.5)):
        for seed in (0, 1):
            name = f"{algorithm}{seed}"
            record_trial(tmp_path, "e", name, {"algorithm": algorithm, "seed": seed, "status": "done"})
            with TrialWriter(tmp_path, "e", name, algorithm, seed) as writer:
                values = ((0, 1.5), (1, loss))
                write(writer, [row(1, c, "ab"[c], "test", "global", "loss", value, 10) for c, value in values])
    return tmp_path


class TestContent:
    def test_numbers_are_those_of_the_tables(self, folder: Path, page: str) -> None:
        (experiment,) = data_of(page)["experiments"]
        names = {method["order"]: method["hyperparameters"] for method in experiment["methods"]}
        (value,) = [
            line[7:]
            for line in experiment["rows"]
            if names[line[0]] == "mu=1" and line[3:7] == ["test", "accuracy", "final", "mean"]
        ]
        # 0.7 + 0, 0.03 and 0.06 by the seeds, and 0.02 by the round
        assert value == pytest.approx([0.75, 0.03, 3])
        assert experiment["repetitions"] == "mean ± sd over 3 seeds"
        assert experiment["metrics"]["loss"] == {"percent": False, "higher": False}

    def test_infinite_means_survive_json(self, infinite: Path) -> None:
        (experiment,) = json.loads(as_json(page_content(infinite)))["experiments"]
        means = {line[7] for line in experiment["rows"] if line[4] == "loss" and line[6] == "mean"}
        assert means == {1.5, "Infinity"}
        assert {line[5] for line in experiment["curves"] if line[3] == "loss"} == {1.5}
        assert experiment["pairs"] == []  # there is no mean difference

    def test_failures_and_pairs_are_there(self, page: str) -> None:
        (experiment,) = data_of(page)["experiments"]
        failed = [trial for trial in experiment["trials"] if trial["status"] == "failed"]
        assert [(trial["error"], trial["traceback"]) for trial in failed] == [(f"ValueError: {HOSTILE}", "at x")]
        assert {(pair["metric"], pair["split"]) for pair in experiment["pairs"]} >= {
            ("accuracy", "test"),
            ("accuracy", "ood"),
        }

    def test_charts_have_the_numbers_that_were_measured(self, page: str) -> None:
        (experiment,) = data_of(page)["experiments"]
        order = {method["hyperparameters"]: method["order"] for method in experiment["methods"]}
        assert experiment["sensitivity"]["keys"] == ["algorithm.mu"]
        assert experiment["sensitivity"]["values"] == {
            str(order[""]): [None],
            str(order["mu=0.1"]): [0.1],
            str(order["mu=1"]): [1],
        }
        clients = experiment["clients"]
        assert (clients["ids"], clients["domains"], clients["omitted"]) == ([0, 1], ["a", "b"], 0)
        series = {tuple(one[:5]): one[5] for one in clients["series"]}
        # the mean over seeds is 0.5 + 0.02, and 0.02 more by the round; the clients are 0.1 below and above it
        assert series[order[""], "global", "test", "accuracy", "final"] == pytest.approx([0.44, 0.64])
        assert experiment["seconds"]["parts"] == ["broadcast", "train", "upload", "aggregate", "evaluate", "other"]
        assert experiment["seconds"]["rows"][0] == [order[""], 0.0, 3.0, 0.0, 1.0, 2.0, 0.5]
        (partition,) = experiment["partitions"]["shown"]
        assert partition["counts"] == [0, 0, 5, 0, 1, 1, 1, 1, 7]  # client, class, examples
        assert (partition["domains"], partition["seed"], partition["orders"]) == (["a", "b"], 0, [order["mu=0.1"]])
        (mapped,) = experiment["maps"]["shown"]
        assert mapped["points"] == [0, 999, 0, 1, 999, 0, 1, 0]  # x, y, domain, class
        assert (mapped["domains"], mapped["labels"], mapped["round"]) == (["a", "b"], ["3", "7"], 2)

    def test_what_is_too_large_is_left_out_and_counted(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The values that are kept first are accuracy and loss, at the rounds that do not look at the split itself."""
        for name, most in (("CLIENT_VALUES", 2 * 24), ("CELLS", 2), ("POINTS", 1)):
            monkeypatch.setattr(f"rayfed.reports.page.charts.MOST_{name}", most)
        (experiment,) = page_content(folder)["experiments"]
        # three methods, two splits, two metrics and four rules, of which half are kept
        assert experiment["clients"]["omitted"] == 24
        assert {one[4] for one in experiment["clients"]["series"]} == {"selected", "final"}
        assert experiment["partitions"] == {"shown": [], "omitted": 1}
        assert experiment["maps"] == {"shown": [], "omitted": 1}

    def test_a_client_of_another_domain_in_each_trial_is_not_mixed(self, tmp_path: Path) -> None:
        """As where trials leave out one domain each, so that the number of a client says nothing about its domain."""
        for name, domains in (("t0", "ab"), ("t1", "bc")):
            left_out = {"leave_out": "abc".replace(domains[0], "").replace(domains[1], "")}
            record_trial(
                tmp_path, "e", name, {"algorithm": "fedavg", "seed": 0, "status": "done", "rounds": 1, **left_out}
            )
            with TrialWriter(tmp_path, "e", name, "fedavg", 0) as writer:
                values = ((0, domains[0], 0.2), (1, domains[1], 0.4))
                write(writer, [row(1, *who, "test", "global", "accuracy", value, 10) for *who, value in values])
                seconds = dict.fromkeys(("broadcast", "train", "upload", "aggregate", "evaluate", "total"), 1.0)
                writer.add_round(Record(round=1, stage="round", cohort=2, bytes_down={}, seconds=seconds))
        (experiment,) = page_content(tmp_path)["experiments"]
        clients = experiment["clients"]
        holders = list(zip(clients["domains"], clients["ids"], strict=True))
        (final,) = [one[5] for one in clients["series"] if one[4] == "final"]
        assert dict(zip(holders, final, strict=True)) == {("a", 0): 0.2, ("b", 0): 0.2, ("b", 1): 0.4, ("c", 1): 0.4}

    def test_the_note_on_clients_that_differ_belongs_to_the_scores_of_which_it_is_true(self, tmp_path: Path) -> None:
        """Everybody is scored at `global`, and the cohort of each round at `trained`."""
        config = {"algorithm": "fedavg", "seed": 0, "status": "done", "default_eval_point": "global"}
        record_trial(tmp_path, "e", "t", config)
        with TrialWriter(tmp_path, "e", "t", "fedavg", 0) as writer:
            for number in (1, 2):
                rows = [(0, "global", "test", "accuracy"), (1, "global", "test", "accuracy")]
                rows += [(number % 2, "trained", "train", "loss")]
                write(writer, [row(number, i, "", split, point, name, 0.5, 5) for i, point, split, name in rows])
        (experiment,) = page_content(tmp_path)["experiments"]
        assert experiment["different"]["scores"] == [("trained", "train", "loss")]

    def test_nothing_is_loaded_and_no_result_becomes_markup(self, page: str) -> None:
        loaded = re.sub(r'<script type="application/json".*?</script>', "", page, flags=re.S)
        assert not re.search(r"(?:src|href)=[\"'](?!data:)|https?://(?!www\.w3\.org/2000/svg)|@import|url\(", loaded)
        assert HOSTILE not in page
        assert "connect-src 'none'" in page
        assert "{{" not in loaded

    def test_a_folder_without_results_is_refused(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([str(tmp_path), "--html", str(tmp_path / "p.html")]) == 2
        assert "no results in it" in capsys.readouterr().err


class TestRepeating:
    def test_a_configuration_names_the_same_trial(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Beside a trial with other keys, so that the table has gaps."""
        monkeypatch.chdir(tmp_path)
        common = {
            "data": {"domains": ["plain", "font"], "per_domain": 40},
            "model": {"name": "mlp", "hidden": [8]},
            "rounds": 1,
            "local": {"batch_size": 4, "lr": 1.0},
            "evaluate.splits": ["val", "test"],
            "metrics.ece": {"bins": 10},
        }
        iid = {"partition": {"name": "iid", "clients": 2}, "cohort": 1.0, "seed": 2}
        trials = [
            rayfed.run({**common, **more}, keep_state=False).trial
            for more in ({"algorithm.name": "fedprox", "algorithm.mu": 0.5, "cohort": 1}, iid)
        ]
        texts = [one["yaml"] for one in configurations(read("results"))]
        written = [yaml.safe_load(text) for text in texts]
        assert {trial_name(Config.read(values)) for values in written} == set(trials)
        assert "# rayfed run FILE.yaml seed=N; seeds of this table: 2." in texts[0]


@pytest.fixture(scope="module")
def server(folder: Path):
    server = make_server(folder, None, 0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


class TestServer:
    def ask(self, server, path: str, **headers: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=300)
        connection.request("GET", path, headers=headers)
        return connection.getresponse()

    def test_it_listens_on_this_machine_only_and_sends_data_once(self, server) -> None:
        assert server.server_address[0] == "127.0.0.1"
        first = self.ask(server, "/data.json?have=")
        assert json.loads(first.read())["experiments"][0]["name"] == "e"
        assert self.ask(server, f"/data.json?have={first.headers['X-Version']}").status == 204
        page = self.ask(server, "/").read().decode()
        assert "const LIVE = true" in page
        assert "connect-src 'self'" in page
        assert self.ask(server, "/etc/passwd").status == 404

    def test_other_names_of_this_machine_are_refused(self, server) -> None:
        """So that a web site that points its own name at this machine cannot read the results."""
        assert self.ask(server, "/data.json", Host="evil.example").status == 403

    def test_a_taken_port_is_refused(self, server, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([str(folder), "--serve", str(server.server_port)]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"rayfed: --serve {server.server_port}: ")
        assert error.count("\n") == 1
        with pytest.raises(UsageError, match=r"^--serve 70000: no such port"):
            make_server(folder, None, 70000)

    def test_it_may_start_before_the_sweep_and_follows_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("rayfed.reports.page.server._LEAST_SECONDS", 0)
        monkeypatch.setattr("rayfed.reports.page.server._SHARE", float("inf"))
        page = LivePage(tmp_path, None)
        text, version = page.data()
        assert json.loads(text)["experiments"] == []
        assert "no results in it" in json.loads(text)["waiting"]
        assert page.data()[1] == version
        record_trial(tmp_path, "e", "t", {"algorithm": "fedavg", "seed": 0})
        text, later = page.data()
        assert later != version
        (experiment,) = json.loads(text)["experiments"]
        assert [trial["status"] for trial in experiment["trials"]] == ["running"]


_WATCH = """<script>window.report = { errors: [] };
addEventListener("error", (event) => report.errors.push(event.message));
addEventListener("securitypolicyviolation", (event) => report.errors.push(event.blockedURI));</script>"""
_DRIVE = """<script>addEventListener("load", () => {
const texts = (list) => [...list].map((one) => one.textContent);
const table = () => [...document.querySelector("table.results").rows].map((line) => texts(line.cells));
const lines = () => document.querySelectorAll("#chart polyline").length;
const dots = (radius) => document.querySelectorAll(`#sensitivity circle[r="${radius}"]`).length;
const drawn = () => ({ curves: lines(), sensitivity: dots(3.5), rings: dots(7),
  clients: texts(document.querySelectorAll("#clients rect title")),
  bars: document.querySelectorAll("#time rect").length,
  partitions: texts(document.querySelectorAll("#partitions circle title")),
  maps: texts(document.querySelectorAll("#maps figcaption")),
  notes: texts(document.querySelectorAll("main .note")).filter((text) => text.startsWith("No map")),
  heights: document.querySelector("#sensitivity polyline")?.getAttribute("points") });
const best = () => texts(document.querySelector("table.results").querySelectorAll("td.best"));
const choose = (id, value) => { const field = document.getElementById(id);
  field[field.type === "checkbox" ? "checked" : "value"] = value;
  field.dispatchEvent(new Event(field.type === "search" ? "input" : "change")); };
Object.assign(report, { title: document.title, first: table(), best: best(), all: drawn() });
choose("find", "fedprox"); report.found = table(); report.ofProx = drawn();
choose("chosen", true); report.chosen = table(); report.ofChosen = drawn();
choose("chosen", false); choose("find", "fedavg"); report.ofAvg = drawn(); choose("find", "");
choose("metric", "loss"); report.loss = table(); report.lossBest = best(); report.ofLoss = drawn();
choose("metric", "accuracy"); choose("split", "val"); report.ofVal = drawn();
choose("split", "ood"); report.ood = table();
choose("split", "test"); choose("rule", "final"); choose("x", "gigabytes");
report.x = document.querySelector("svg.chart").textContent;
document.querySelector("table.results th").click(); report.sorted = table().map((line) => line[0]);
report.failures = texts(document.querySelectorAll(".failure"));
report.yaml = document.querySelectorAll("#repeat pre").length;
const told = Object.assign(document.createElement("pre"), { id: "report", textContent: JSON.stringify(report) });
document.body.replaceChildren(told);
});</script>"""


_SHOW = """<script>addEventListener("load", () => {
const field = document.getElementById("metric"); field.value = "loss"; field.dispatchEvent(new Event("change"));
const lines = [...document.querySelector("table.results").rows].slice(1);
document.title = JSON.stringify(lines.map((line) => [...line.cells].map((one) => one.textContent)));
});</script>"""


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
    path.write_text(page.replace("<head>", f"<head>{_WATCH}", 1).replace("</body>", f"{_DRIVE}</body>"), "utf-8")
    done = browse(path, "--dump-dom")
    assert "CONSOLE" not in done.stderr
    (report,) = re.findall(r'<pre id="report">(.*?)</pre>', done.stdout, re.S)
    return json.loads(html.unescape(report))


@pytest.mark.slow
class TestBrowser:
    def test_it_renders_without_errors(self, seen: dict) -> None:
        assert seen["errors"] == []
        assert seen["title"] == "rayfed results"
        assert seen["yaml"] == 3

    def test_the_table_is_that_of_the_report(self, seen: dict) -> None:
        # worst repeats a, and is left out
        assert seen["first"][0] == ["algorithm", "hyperparameters", "a", "b", "AVG"]
        assert seen["first"][3] == ["fedprox", "mu=1 †", "65.00 ± 3.00", "85.00 ± 3.00", "75.00 ± 3.00"]
        assert seen["best"] == ["65.00 ± 3.00", "85.00 ± 3.00", "75.00 ± 3.00"]

    def test_it_shows_infinite_means(self, infinite: Path) -> None:
        path = infinite / "page.html"
        write_page(infinite, None, path)
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace("<head>", f"<head>{_WATCH}", 1).replace("</body>", f"{_SHOW}</body>"), "utf-8")
        cells = re.findall("<title>(.*?)</title>", browse(path, "--dump-dom").stdout)[0]
        assert json.loads(html.unescape(cells)) == [
            ["dbe", "1.500 ± 0.000", "∞", "∞"],
            ["fedavg", *["1.500 ± 0.000"] * 3],
        ]

    def test_a_curve_says_how_many_seeds_are_left(self, tmp_path: Path) -> None:
        """Seed 1 stopped after the first round."""
        for seed, rounds in ((0, 2), (1, 1)):
            record_trial(tmp_path, "e", f"t{seed}", {"algorithm": "fedavg", "seed": seed, "status": "done"})
            with TrialWriter(tmp_path, "e", f"t{seed}", "fedavg", seed) as writer:
                for number in range(1, rounds + 1):
                    write(writer, [row(number, 0, "a", "test", "global", "accuracy", 0.5, 10)])
        path = tmp_path / "page.html"
        write_page(tmp_path, None, path)
        assert "fedavg (2 to 1 seeds)" in browse(path, "--dump-dom").stdout

    def test_filters(self, seen: dict) -> None:
        assert [line[0] for line in seen["found"]] == ["algorithm", "fedprox", "fedprox"]
        assert [line[1] for line in seen["chosen"]] == ["hyperparameters", "mu=1 †"]
        assert seen["lossBest"] == ["1.270 ± 0.030"] * len(seen["lossBest"])
        assert seen["ood"][0] == ["algorithm", "hyperparameters", "c"]
        assert seen["ood"][1][2] == "32.00 ± 2.00"
        assert "GB sent so far" in seen["x"]
        assert seen["sorted"] == ["algorithm", "fedavg", "fedprox", "fedprox"]

    def test_filters_reach_every_chart(self, seen: dict) -> None:
        counts = {
            name: {
                key: len(of[key]) if key in ("clients", "partitions", "maps") else of[key]
                for key in ("curves", "sensitivity", "rings", "clients", "bars", "partitions", "maps")
            }
            for name, of in seen.items()
            if name in ("all", "ofProx", "ofChosen", "ofAvg", "ofVal")
        }
        every = {"curves": 3, "sensitivity": 2, "rings": 1, "clients": 6, "bars": 18, "partitions": 3, "maps": 2}
        assert counts["all"] == every
        assert counts["ofProx"] == every | {"curves": 2, "clients": 4, "bars": 12}
        one = every | {"curves": 1, "clients": 2, "bars": 6}
        assert counts["ofChosen"] == one | {"sensitivity": 0, "rings": 0, "partitions": 0, "maps": 0}
        assert counts["ofAvg"] == counts["ofChosen"]
        assert counts["ofVal"] == every | {"maps": 0}
        assert seen["ofVal"]["notes"] == ["No map at this choice; there are maps of the global model on test data."]
        assert seen["all"]["clients"][:2] == ["fedavg, client 0 (a): 44", "fedavg, client 1 (b): 64"]
        assert seen["ofLoss"]["clients"][0] == "fedavg, client 0 (a): 1.48"
        assert seen["ofLoss"]["heights"] != seen["all"]["heights"]
        assert "client 0 (a), class 0: 5 examples" in seen["all"]["partitions"]
        assert seen["all"]["maps"][0] == "fedprox mu=0.1, global model, features, seed 0, round 2: by domain"

    def test_failures_are_shown_as_text(self, seen: dict) -> None:
        assert seen["failures"] == [f"dbe0 failed: ValueError: {HOSTILE}at x"]

    def test_a_served_page_follows_the_results(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The browser opens the page before there are results, which come while it is open."""
        monkeypatch.setattr("rayfed.reports.page.server._LEAST_SECONDS", 0)
        monkeypatch.setattr("rayfed.reports.page.server._SHARE", float("inf"))
        server = make_server(tmp_path, None, 0)
        live = server.RequestHandlerClass.page
        read_data, asked = live.data, []

        def data() -> tuple[str, str]:
            asked.append(read_data())
            if len(asked) == 2:
                add(tmp_path, "t", "fedavg", 0, 0.5)
            return asked[-1]

        monkeypatch.setattr(live, "data", data)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--dump-dom"]
            profile = f"--user-data-dir={tmp_path / 'profile'}"
            address = f"http://127.0.0.1:{server.server_port}/"
            command = [browser(), *flags, profile, "--virtual-time-budget=20000", address]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
        finally:
            server.shutdown()
            server.server_close()
        assert json.loads(asked[0][0])["experiments"] == []
        assert len(asked) >= 3
        assert '<table class="results">' in done.stdout
        assert "live, last asked" in done.stdout


def test_trials_of_an_own_method_say_that_code_belongs_to_them(tmp_path: Path) -> None:
    add(tmp_path, "t", "fedavg", 0, 0.5, code_hash="abc")
    (configuration,) = configurations(read(tmp_path))
    assert "names code of your own, which must be the same (code_hash abc)" in configuration["yaml"]
