"""The pages of the documentation: links resolve, commands are valid, and what is named exists."""

import re
import shlex
from pathlib import Path

import pytest
import torch
import yaml

from rayfed.core.errors import UsageError
from rayfed.experiments.config import Config
from rayfed.experiments.plan import make_plan
from rayfed.experiments.sources import from_arguments
from rayfed.records.storage import is_url

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def without_code(text: str) -> str:
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_resolve(page):
    for target in (link or image for link, image in LINK.findall(without_code(page.read_text()))):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        linked = (page.parent / name).resolve() if name else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


def test_the_index_lists_every_page():
    index = (DOCS / "index.md").read_text()
    assert [page.name for page in DOCS.glob("*.md") if page.name != "index.md" and f"({page.name})" not in index] == []
    fidelity = (DOCS / "fidelity" / "index.md").read_text()
    assert [page.name for page in (DOCS / "fidelity").glob("*.md") if f"({page.name})" not in fidelity] == ["index.md"]


def commands() -> list[str]:
    lines = [line for page in PAGES for line in re.findall(r"^    (rayfed .*)$", page.read_text(), re.MULTILINE)]
    return list(dict.fromkeys(re.sub(r"\s+#.*$", "", line) for line in lines))


@pytest.mark.parametrize("line", commands())
def test_commands_are_valid(line, monkeypatch):
    from rayfed.cli.main import COMMANDS

    _, command, *arguments = shlex.split(line, comments=True)
    assert command in COMMANDS
    values = [argument for argument in arguments if re.match(r"[\w.:]+=", argument)]
    if command not in ("run", "partition") or any(":" in value.split("=", 1)[1] for value in values):
        return  # a sweep's values may be spaces; one's own module is in another snippet
    has_file = any(argument.endswith(".yaml") for argument in arguments)  # with other keys, which are not here
    try:
        config = Config.read(from_arguments(values))
        embedded = config.data.name == "mini_digits" and "file" not in config.partition.options
        if command == "run" and embedded and not has_file and not is_url(config.results):
            make_plan(config)
    except UsageError as error:
        pytest.fail(f"{line}: {error}")


def test_the_algorithm_with_a_setup_exchange_runs(here):
    import rayfed

    (code,) = re.findall(r"```python\n# adjusted.py\n(.*?)```", (DOCS / "extending.md").read_text(), re.DOTALL)
    (here / "adjusted.py").write_text(code)
    clients = [{"train": (torch.randn(20, 4), y), "test": (torch.randn(6, 4), y[:6])} for y in LABELS]
    config = {
        "algorithm": {"name": "adjusted:Adjusted", "tau": 0.5},
        "rounds": 1,
        "model": {"name": "mlp", "hidden": [4]},
    }
    result = rayfed.run(config, clients=clients)
    assert result.server["counts"].tolist() == [30, 10]
    assert result.rounds["stage"].tolist() == ["setup", "round"]


LABELS = (torch.tensor([0, 1] * 10), torch.zeros(20, dtype=torch.long))


def test_the_citation_agrees_with_the_package():
    import rayfed

    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert (citation["version"], citation["license"]) == (rayfed.__version__, "Apache-2.0")


@pytest.mark.parametrize("page", sorted((DOCS / "fidelity").glob("0*.md")), ids=lambda page: page.stem)
def test_fidelity_commands_name_tables_that_exist(page):
    text = page.read_text()
    tables = set(re.findall(r"benchmarks/papers/run\.py (\w+)", text))
    assert tables
    assert {table for table in tables if not (ROOT / "benchmarks" / "papers" / f"{table}.yaml").exists()} == set()
    for script in re.findall(r"python (benchmarks/\w+\.py)", text):
        assert (ROOT / script).exists()


@pytest.mark.parametrize("page", [ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *DOCS.glob("*.md")], ids=relative)
def test_source_files_named_in_a_page_exist(page):
    names = re.findall(r"`((?:\w+/)+\w+\.py|(?:\w+/)+)`", page.read_text())
    folders = [ROOT, ROOT / "rayfed", ROOT / "rayfed" / "algorithms"]
    names = [name for name in names if not name.startswith("build/")]  # what make writes
    ours = [name for name in names if any((folder / name.split("/")[0]).exists() for folder in folders)]
    assert [name for name in ours if not any((folder / name).exists() for folder in folders)] == []


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_no_page_has_a_path_of_a_machine(page):
    assert not re.search(r"/(?:work|home|root|tmp)/\w", page.read_text())
