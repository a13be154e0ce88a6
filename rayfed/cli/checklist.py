"""The lines of a checklist, as `rayfed check` and `rayfed doctor` print it."""

import textwrap

_WIDTH = 118
_INDENT = 21


def checklist_line(mark: str, subject: str, found: str) -> str:
    """Return one entry of a checklist: whether it is in order, what was looked at, and what was found."""
    return _filled(f"{mark:8} {subject:11} {found}", first=0, then=_INDENT)


def under_line(word: str, text: str) -> str:
    """Return `text` after `word`, as an addition to the entry above."""
    return _filled(f"{word} {text}", first=_INDENT, then=_INDENT + len(word) + 1)


def _filled(text: str, first: int, then: int) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent=" " * first, subsequent_indent=" " * then, break_on_hyphens=False)
