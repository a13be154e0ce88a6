"""The packages of the distribution and its README; everything else is declared in pyproject.toml.

The search spaces and the documentation are at the top of the repository, and in the package of a wheel.
"""

import re
import tomllib
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
PROJECT = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REPOSITORY = PROJECT.get("urls", {}).get("Repository", "")


def with_absolute_links(text: str) -> str:
    """Return the README with links that work anywhere, as on the page of a package index.

    Without the address of the repository, its links are their words, and its images are left out.
    """

    def absolute(match: re.Match[str]) -> str:
        is_image = match[1].startswith("!")
        if not REPOSITORY:
            return "" if is_image else match[1][1:-1]
        return f"{match[1]}({REPOSITORY}/{'raw' if is_image else 'blob'}/main/{match[2]})"

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
        "rayfed.data": ["*.yaml", "heart_disease/*"],
        "rayfed.reports.page": ["*.html", "*.css", "*.js"],
        "rayfed.tune_spaces": ["*.yaml"],
        "rayfed.docs": ["*.md"],
        "rayfed.docs.images": ["*"],
    },
    include_package_data=False,  # MANIFEST.in is about the source distribution only
)
