"""What is declared, what is pinned and what is written about it agree."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DIRECT = PROJECT["dependencies"] + [item for extra in PROJECT["optional-dependencies"].values() for item in extra]


def name_of(requirement: str) -> str:
    return re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def pins() -> dict[str, str]:
    lines = [line.strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {name.lower().replace("_", "-"): version for name, version in pairs}


@pytest.mark.parametrize("requirement", DIRECT)
def test_every_direct_dependency_is_pinned_within_its_range(requirement):
    from packaging.requirements import Requirement

    wanted = Requirement(requirement)
    assert name_of(requirement) in pins()
    assert wanted.specifier.contains(pins()[name_of(requirement)])


def test_installed_under_its_name():
    assert metadata("rayfed-sim")["Name"] == "rayfed-sim"


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_makefile_has_its_targets():
    assert {"venv", "install", "demo", "test", "test-all", "lint", "bench", "clean"} <= make_targets()


def test_readme_names_only_targets_that_exist():
    readme = ROOT / "README.md"
    if not readme.exists():
        pytest.skip("no README.md")
    code = re.findall(r"```.*?```|`[^`\n]+`", readme.read_text(), re.DOTALL)
    named = {target for block in code for target in re.findall(r"\bmake ([a-z][a-z-]*)", block)}
    assert named <= make_targets()


def test_no_package_index_is_written_down():
    for name in ("constraints.txt", "Makefile", "pyproject.toml", ".ci/run"):
        text = (ROOT / name).read_text()
        for url in PROJECT["urls"].values():
            text = text.replace(url, "")
        assert "index-url" not in text
        assert "://" not in text


def test_the_site_names_the_projects_url():
    assert f"repo_url: {PROJECT['urls']['Repository']} " in (ROOT / "mkdocs.yml").read_text()


def test_the_wheel_has_the_spaces_and_the_documents(tmp_path):
    pytest.importorskip("setuptools")
    source = tmp_path / "source"
    source.mkdir()
    for name in ("rayfed", "tune_spaces", "docs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md"):
        shutil.copy(ROOT / name, source / name)
    build = "import sys; from setuptools.build_meta import build_wheel; print(build_wheel(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    spaces = {f"rayfed/tune_spaces/{path.name}" for path in (ROOT / "tune_spaces").glob("*.yaml")}
    pages = {f"rayfed/docs/{path.name}" for path in (ROOT / "docs").glob("*.md") if "fidelity" not in path.name}
    images = {f"rayfed/docs/images/{path.name}" for path in (ROOT / "docs" / "images").iterdir()}
    assert {
        "rayfed/py.typed",
        "rayfed/__main__.py",
        "rayfed/experiments/catalogue.json",
        *spaces,
        *pages,
        *images,
    } <= names
    assert not [name for name in names if "fidelity" in name]
    entry_points = zipfile.ZipFile(wheel).read(next(name for name in names if name.endswith("entry_points.txt")))
    assert b"rayfed = rayfed.cli.main:main" in entry_points
