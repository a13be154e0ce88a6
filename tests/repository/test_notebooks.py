"""The notebooks below docs/ are small, were stored without errors, and run from start to end."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def outputs(notebook: Path) -> list[dict[str, object]]:
    cells = json.loads(notebook.read_text())["cells"]
    return [output for cell in cells for output in cell.get("outputs", [])]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_stored_is_small_and_without_errors(notebook):
    assert notebook.stat().st_size < 100_000
    kinds = {output["output_type"] for output in outputs(notebook)}
    assert kinds  # the site shows them
    assert kinds <= {"stream", "execute_result", "display_data"}
    assert not re.search(r"/(?:work|home|root|tmp)/\w", notebook.read_text())


def test_the_tour_begins_with_an_installation():
    """It installs the clone around the notebook; `test_runs` shows that it does nothing where rayfed is installed."""
    notebook = ROOT / "docs" / "notebooks" / "tour.ipynb"
    first = next(cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code")
    assert "%pip install --quiet ../..\n" in "".join([*first["source"], "\n"])
    assert (notebook.parent / "../..").resolve() == ROOT


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(notebook, tmp_path, monkeypatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    resources = {"metadata": {"path": str(tmp_path)}}
    book = nbformat.read(notebook, as_version=4)
    stored = [len(cell.get("outputs", [])) for cell in book.cells]
    nbclient.NotebookClient(book, timeout=300, kernel_name="python3", resources=resources).execute()
    assert [len(cell.get("outputs", [])) for cell in book.cells] == stored
