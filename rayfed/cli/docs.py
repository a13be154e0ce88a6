"""`rayfed docs`: list the pages of the documentation, print one, or generate those that are made from the code."""

import argparse
from pathlib import Path

from rayfed.cli.packaged import packaged_folder
from rayfed.core.errors import UsageError
from rayfed.core.options import suggestion

GENERATED = ("algorithms",)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "List the pages of the documentation and their folder, or print a page (Markdown)."
    parser.add_argument("page", nargs="?", metavar="PAGE", help="print this page")
    parser.add_argument(
        "--generate",
        choices=GENERATED,
        help=f"for developers, in a checkout: write what is made from the code ({', '.join(GENERATED)})",
    )


def execute(options: argparse.Namespace) -> int:
    folder = packaged_folder("docs")
    if options.generate is not None:
        from rayfed.cli.algorithm_pages import algorithms_page  # imports torch

        page = folder / f"{options.generate}.md"
        page.write_text(algorithms_page(), encoding="utf-8")
        print(page)
        return 0
    pages = {path.stem: path for path in sorted(folder.glob("*.md"))}
    if options.page is None:
        width = max(map(len, pages))
        titles = [f"  {name:<{width}}  {_title(path)}" for name, path in pages.items()]
        print("\n".join([f"Documentation in {folder}; rayfed docs PAGE prints a page:", *titles]))
        return 0
    name = options.page.removesuffix(".md")
    if name not in pages:
        raise UsageError(f"{options.page}: no such page; {suggestion(name, pages)}")
    print(pages[name].read_text(encoding="utf-8"), end="")
    return 0


def _title(page: Path) -> str:
    first = page.read_text(encoding="utf-8").partition("\n")[0]
    return first.lstrip("# ")
