"""Documents that are made from the code are those that the code makes."""

from pathlib import Path

from rayfed.algorithm_pages import pages

PAGE = Path(__file__).parent.parent / "docs" / "algorithms.md"


def test_algorithm_pages_are_up_to_date():
    assert PAGE.read_text() == pages() + "\n", "make docs"
