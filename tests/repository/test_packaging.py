"""What is declared, what is pinned and what is written about it agree."""

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_string
from importlib.metadata import distributions
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


def test_every_pin_holds_for_every_declared_python():
    """As the installed distributions declare it; what is not installed in the pinned version says nothing."""
    from packaging.specifiers import SpecifierSet

    declared = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert PROJECT["requires-python"] == f">={declared[0]}"
    needs = {
        name_of(each.name): SpecifierSet(each.metadata.get("Requires-Python") or "")
        for each in distributions()
        if each.version.partition("+")[0] == pins().get(name_of(each.name))
    }
    assert {"torch", "ray", "numpy", "pytest"} <= set(needs)
    refused = [(name, python) for name in needs for python in declared if f"{python}.0" not in needs[name]]
    assert refused == []


def test_ray_has_an_upper_bound_just_above_the_pin():
    from packaging.requirements import Requirement

    (ray,) = (Requirement(each) for each in PROJECT["dependencies"] if name_of(each) == "ray")
    major, minor = map(int, pins()["ray"].split(".")[:2])
    assert f"{major}.{minor}.99" in ray.specifier
    assert f"{major}.{minor + 1}" not in ray.specifier


def in_the_image() -> list[str]:
    """Return what the .dockerignore lets through, and check the form of the file: all is left out but these."""
    everything, *lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] != "#"]
    assert everything == "*"
    return [line[1:] for line in lines if line[0] == "!"]


def test_no_package_index_is_written_down():
    for name in ("constraints.txt", "Makefile", "Dockerfile", "pyproject.toml", ".ci/run"):
        text = (ROOT / name).read_text()
        assert "index-url" not in text
        assert "://" not in text


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of what the image is built from and the source distribution needs, in which a build leaves its files."""
    pytest.importorskip("setuptools")
    copy = tmp_path_factory.mktemp("source")
    for name in [*in_the_image(), "MANIFEST.in", "CHANGELOG.md"]:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy / name)
    return copy


def built(kind: str, source: Path, folder: Path) -> Path:
    code = f"import sys; from setuptools.build_meta import build_{kind}; build_{kind}(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", code, str(folder)], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (file,) = folder.iterdir()
    return file


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    return zipfile.ZipFile(built("wheel", source, tmp_path_factory.mktemp("wheel")))


def file_of(wheel: zipfile.ZipFile, name: str) -> str:
    (path,) = (path for path in wheel.namelist() if path.endswith(f".dist-info/{name}"))
    return wheel.read(path).decode()


def test_the_wheel_has_the_spaces_and_the_documents(wheel):
    names = set(wheel.namelist())
    spaces = {f"rayfed/tune_spaces/{path.name}" for path in (ROOT / "tune_spaces").glob("*.yaml")}
    pages = {f"rayfed/docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    images = {f"rayfed/docs/images/{path.name}" for path in (ROOT / "docs" / "images").iterdir()}
    own = {"rayfed/py.typed", "rayfed/__main__.py"}
    assert {*own, *spaces, *pages, *images} <= names
    assert {name for name in names if name.startswith("rayfed/docs/")} == pages | images
    code = {str(path.relative_to(ROOT)) for path in (ROOT / "rayfed").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == code
    assert "rayfed = rayfed.cli.main:main" in file_of(wheel, "entry_points.txt")
    assert file_of(wheel, "licenses/LICENSE") == (ROOT / "LICENSE").read_text()


def test_links_and_images_of_the_readme_work_on_a_package_index(wheel):
    text = message_from_string(file_of(wheel, "METADATA")).get_payload()
    outside = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", outside)
    assert "https://www.ray.io" in targets
    assert "Start with the ten-minute tour or a notebook." in " ".join(text.split())
    assert [target for target in targets if not re.match(r"https://|#", target)] == []


def test_the_source_distribution_builds_and_tests(source, tmp_path):
    with tarfile.open(built("sdist", source, tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    code = {str(path.relative_to(ROOT)) for path in (ROOT / "rayfed").rglob("*.py")}
    pages = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")}
    assert {"pyproject.toml", "setup.py", "README.md", "LICENSE", *code, *pages} <= names
    kept = (ROOT / "MANIFEST.in").read_text()
    assert all(f"graft {folder}\n" in kept for folder in ("benchmarks", "docs", "tests", "tune_spaces"))
