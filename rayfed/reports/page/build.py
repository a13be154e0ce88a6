"""The page as one HTML file, which needs no network: style, scripts, charts and tables are in it."""

import json
from functools import cache
from pathlib import Path

from rayfed.core.file_names import writing
from rayfed.reports.page.content import page_content
from rayfed.reports.view import DEFAULT_VIEW, View


def write_page(folder: str | Path, experiment: str | None, path: str | Path, view: View = DEFAULT_VIEW) -> None:
    """Write the page on `experiment`, or on every experiment in `folder`.

    It opens with the metric and the split of `view`, and has all others to choose from.

    Raises:
        UsageError: there are no results, or the file cannot be written.
    """
    page = page_html(folder, experiment, view)
    with writing(path):
        Path(path).write_text(page, encoding="utf-8")


def page_html(folder: str | Path, experiment: str | None = None, view: View = DEFAULT_VIEW) -> str:
    """Return the page.

    Raises:
        UsageError: there are no results.
    """
    import jinja2

    import rayfed

    page = page_content(folder, experiment, view)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("rayfed.reports.page", ""), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals["zip"] = zip
    charts = json.dumps(page.charts, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return environment.get_template("page.html").render(
        page=page, charts=charts, vega=_vega() if page.charts else "", version=rayfed.__version__
    )


@cache
def _vega() -> str:
    """Return the script of Vega, Vega-Lite and Vega-Embed."""
    import vl_convert

    return str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")).replace("</script", "<\\/script")
