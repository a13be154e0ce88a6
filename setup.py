"""The packages of the distribution; everything else is declared in pyproject.toml.

The search spaces and the documentation are at the top of the repository, and in the package of a wheel.
"""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["rayfed", "rayfed.*"]),
        "rayfed.tune_spaces",
        "rayfed.docs",
        "rayfed.docs.images",
    ],
    package_dir={"rayfed.tune_spaces": "tune_spaces", "rayfed.docs": "docs"},
    package_data={
        "rayfed": ["py.typed", "experiments/catalogue.json"],
        "rayfed.results.page": ["*.html", "*.css", "*.js"],
        "rayfed.tune_spaces": ["*.yaml"],
        "rayfed.docs": ["*.md"],
        "rayfed.docs.images": ["*"],
    },
    exclude_package_data={"rayfed.docs": ["fidelity*"]},
)
