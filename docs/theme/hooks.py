"""What MkDocs needs besides the pages in docs/: the reference, made from the code, and links that work on a site.

The pages link to each other and to files of the repository as a reader of the repository needs it. On the site, the
Markdown files at the top of the repository are pages in project/, and links to other files lead to the repository.
"""

import contextlib
import dataclasses
import io
import os
import posixpath
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["COLUMNS"] = "100"  # the width of the commands' help

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import rayfed
from rayfed.cli.help import default_text
from rayfed.cli.main import COMMANDS
from rayfed.cli.main import main as rayfed_command
from rayfed.core.registry import resolve
from rayfed.experiments.components import KINDS, summary
from rayfed.experiments.config import GROUPS, Config
from rayfed.experiments.space import Search

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(\[[^\]]*\])\(([^)\s:]+)\)")
FENCED = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)
PROGRAMS = r"rayfed|make|pip|python|source|sbatch|export|\.venv/"
IN_A_SHELL = re.compile(rf"(?<=\n\n) {{4}}(?:{PROGRAMS}).*\n(?: {{4}}.*\n|\n(?= {{4}}))*")
PROJECT = {
    "ARCHITECTURE.md": "project/architecture.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "SECURITY.md": "project/security.md",
}
ELSEWHERE = {"README.md": "index.md", "docs/index.md": "index.md", "rayfed/algorithm.py": "reference/algorithm.md"}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that do not lie in docs/."""
    pages = {
        "reference/keys.md": keys_page(),
        "reference/commands.md": commands_page(),
        "reference/python.md": python_page(),
        "reference/algorithm.md": interface_page("Interface of an algorithm", ["rayfed.algorithm", "rayfed.core.task"]),
        "reference/parts.md": interface_page("Interfaces of other parts", PARTS),
    }
    pages |= {target: (ROOT / name).read_text(encoding="utf-8") for name, target in PROJECT.items()}
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Let links lead to pages of the site or to the repository, and show a page's title where its file is named."""
    path = page.file.src_uri
    source = {target: name for name, target in PROJECT.items()}.get(path, f"docs/{path}")

    def replaced(match: re.Match[str]) -> str:
        text, target = match.groups()
        name, _, anchor = target.partition("#")
        if not name:
            return match.group()
        linked = posixpath.normpath(posixpath.join(posixpath.dirname(source), name))
        inside = (PROJECT | ELSEWHERE).get(linked, linked.removeprefix("docs/") if linked.startswith("docs/") else None)
        if inside is None or files.get_file_from_path(inside) is None:
            return f"{text}({config.repo_url.rstrip('/')}/blob/main/{linked})" if config.repo_url else text[1:-1]
        if inside in ELSEWHERE.values():
            anchor = ""
        if text[1:-1].strip("`") in (name, name.removeprefix("../"), linked, f"{Path(name).stem}.md"):
            text = f"[{title(ROOT / linked)}]"
        return f"{text}({posixpath.relpath(inside, posixpath.dirname(path) or '.')}{'#' + anchor if anchor else ''})"

    text = "".join(piece if i % 2 else IN_A_SHELL.sub(fenced, piece) for i, piece in enumerate(FENCED.split(markdown)))
    pieces = []
    for i, piece in enumerate(FENCED.split(text)):
        if i % 2:
            pieces.append(piece)
        else:
            parts = re.split(r"(`[^`\n]+`(?!\]))", piece)
            pieces += [part if k % 2 else LINK.sub(replaced, part) for k, part in enumerate(parts)]
    return "".join(pieces)


def fenced(match: re.Match[str]) -> str:
    """Turn an indented block of commands into a fenced one, which says its language."""
    return f"```bash\n{textwrap.dedent(match.group())}```\n"


def title(path: Path) -> str:
    """Return the title of a page: its first line."""
    if path.suffix != ".md":
        return path.name
    return path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")


def keys_page() -> str:
    """Return the page of all keys, from the declarations of the options."""
    lines = ["# Keys of a configuration", "", KEYS, "## At the top", "", *table(Config)]
    for name, group in GROUPS.items():
        lines += [f"## `{name}`", "", *table(group, f"{name}.")]
    lines += ["## `search`, in a search space", "", *table(Search, "search.")]
    titles = {"data": "Datasets", "partition": "Partitions", "model": "Models", "augment": "Augmentations"}
    for kind in (kind for kind in KINDS if kind != "algorithm"):
        lines += [f"## {titles.get(kind, kind.capitalize())}", ""]
        for name in KINDS[kind]:
            prefix = f"metrics.{name}." if kind == "metrics" else f"{kind}."
            chosen = f"metrics.{name}=true" if kind == "metrics" else f"{kind}.name={name}"
            declared = table(resolve(name, KINDS[kind], where=kind), prefix)
            lines += [f"### `{chosen}`", "", sentence(summary(kind, name)), "", *declared]
    return "\n".join(lines)


KEYS = """\
This page is made from the declarations of the options in the code. The keys of the algorithms are on the page
[Algorithms](../algorithms.md). `rayfed run --help` and `rayfed list` print the same in a terminal.
"""


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if not text or text.endswith(".") else ".")


def table(declaration: Any, prefix: str = "") -> list[str]:
    """Return the rows of a table of options, and an empty line; no rows for a class without options."""
    if not dataclasses.is_dataclass(declaration):
        return []
    rows = list(rows_of(declaration, prefix))
    return ["| key | default | meaning |", "|---|---|---|", *rows, ""] if rows else []


def rows_of(declaration: Any, prefix: str) -> Iterator[str]:
    """Yield a row for each option, and after a section the rows of its options."""
    for field in dataclasses.fields(declaration):
        if field.metadata.get("help"):
            default = cell(code(default_text(field)))
            yield f"| `{prefix}{field.name}` | {default} | {cell(field.metadata['help'])} |"
        section = field.metadata.get("section")
        if section is not None:
            yield from rows_of(section, f"{prefix}{field.name}.")


def code(text: str) -> str:
    return f"`{text}`" if text and not text.startswith("(") else text


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;") if "`" not in text else text.replace("|", "\\|")


def commands_page() -> str:
    """Return the page of all commands: their help, without the keys of configurations."""
    lines = ["# Commands", "", "`rayfed COMMAND --help` prints what this page shows.", ""]
    for name, about in COMMANDS.items():
        text = re.split(r"\n(?:keys of the|Instead of a value)", help_of(name))[0].rstrip()
        lines += [f"## `rayfed {name}`", "", sentence(about), "", "```text", text, "```", ""]
    return "\n".join(lines)


def help_of(command: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        rayfed_command([command, "--help"])
    return printed.getvalue()


PARTS = [
    "rayfed.data.dataset",
    "rayfed.data.population",
    "rayfed.data.user_clients",
    "rayfed.data.partitions.base",
    "rayfed.augment.base",
    "rayfed.metrics.base",
]


def python_page() -> str:
    """Return the page of what `rayfed` exports."""
    lines = ["# Python API", "", f"rayfed {rayfed.__version__} exports these names.", ""]
    functions = [name for name in rayfed.__all__ if name.islower()]
    for name in [*functions, *(name for name in rayfed.__all__ if name not in functions)]:
        origin = ".".join(rayfed._origin(name))
        if name == "Algorithm":
            text = "The base class of all methods; see [Interface of an algorithm](algorithm.md)."
            lines += [f"## rayfed.{name}", "", text, ""]
        else:
            names = f"heading: rayfed.{name}, toc_label: rayfed.{name}, heading_level: 2"
            lines += [
                f"::: {origin}",
                f"    options: {{{names}, show_root_heading: true, show_root_toc_entry: true}}",
                "",
            ]
    return "\n".join(lines)


def interface_page(heading: str, modules: list[str]) -> str:
    return "\n".join([f"# {heading}", "", *directives(modules)])


def directives(modules: list[str]) -> Iterator[str]:
    for module in modules:
        yield from (f"## `{module}`", "", f"::: {module}", "")
