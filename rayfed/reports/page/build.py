"""The page as one HTML file, which needs no network: style, script and data are in it."""

from importlib import resources
from pathlib import Path

from rayfed.core.errors import UsageError
from rayfed.reports.page.content import as_json, page_content

_SCRIPTS = ("base.js", "tables.js", "charts.js", "page.js")
"""The parts of the script in their order; together they are one."""
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src {}"
"""The content security policy: a page from a file may not load anything, and a served one only its data."""


def write_page(folder: str | Path, experiment: str | None, path: str | Path, *, select: str | None = None) -> None:
    """Write the page on `experiment`, or on every experiment in `folder`; `select` is as in `read`.

    Raises:
        UsageError: there are no results, or the file cannot be written.
    """
    page = page_html(as_json(page_content(folder, experiment, select)))
    try:
        Path(path).write_text(page, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror or error})") from error


def page_html(data: str, *, live: bool = False) -> str:
    """Return the page.

    Args:
        data: the content as JSON, from `as_json`.
        live: whether the page asks its server for new data.
    """
    files = resources.files(__package__)
    template = files.joinpath("page.html").read_text(encoding="utf-8")
    parts = {
        "{{policy}}": _POLICY.format("'self'" if live else "'none'"),
        "{{style}}": files.joinpath("page.css").read_text(encoding="utf-8"),
        "{{live}}": "true" if live else "false",
        "{{script}}": "\n".join(files.joinpath(name).read_text(encoding="utf-8") for name in _SCRIPTS),
    }
    for mark, text in parts.items():
        template = template.replace(mark, text)
    return template.replace("{{data}}", data)  # last, since data may contain anything
