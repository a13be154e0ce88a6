"""The packages of the distribution and its README; everything else is declared in pyproject.toml.

The search spaces and the documentation are at the top of the repository, and in the package of a wheel.
"""

import re
import tomllib
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
REPOSITORY = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Repository"]


def with_absolute_links(text: str) -> str:
    """Return the README with links that work anywhere, as on the page of a package index."""

    def absolute(match: re.Match[str]) -> str:
        return f"{match[1]}({REPOSITORY}/{'raw' if match[1].startswith('!') else 'blob'}/main/{match[2]})"

    return re.sub(r"(!?\[[^\]]*\])\((?![a-z]+:|#)([^)\s]+)\)", absolute, text)


setup(
    long_description=with_absolute_links((HERE / "README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
    packages=[
        *find_packages(include=["rayfed", "rayfed.*"]),
        "rayfed.tune_spaces",
        "rayfed.docs",
        "rayfed.docs.images",
    ],
    package_dir={"rayfed.tune_spaces": "tune_spaces", "rayfed.docs": "docs"},
    package_data={
        "rayfed": ["py.typed"],
        "rayfed.data": ["*.yaml"],
        "rayfed.reports.page": ["*.html", "*.css", "*.js"],
        "rayfed.tune_spaces": ["*.yaml"],
        "rayfed.docs": ["*.md"],
        "rayfed.docs.images": ["*"],
    },
    include_package_data=False,  # MANIFEST.in is about the source distribution only
)
