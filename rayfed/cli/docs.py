"""`rayfed docs`: list the pages of the documentation, or print a page."""

import argparse

from rayfed.cli.arguments import packaged_folder
from rayfed.core.errors import UsageError
from rayfed.core.options import suggestion


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "List the pages of the documentation and their folder, or print a page (Markdown)."
    parser.add_argument("page", nargs="?", metavar="PAGE", help="print this page")


def execute(options: argparse.Namespace) -> int:
    folder = packaged_folder("docs")
    pages = {}
    for path in sorted(folder.glob("*.md")):
        pages[path.stem] = path.read_text(encoding="utf-8")
    if options.page is None:
        width = max(map(len, pages))
        titles = []
        for name, text in pages.items():
            title = text.splitlines()[0].lstrip("# ")
            titles.append(f"  {name:<{width}}  {title}")
        print("\n".join([f"Documentation in {folder}; rayfed docs PAGE prints a page:", *titles]))
        return 0
    name = options.page.removesuffix(".md")
    if name not in pages:
        raise UsageError(f"{options.page}: no such page; {suggestion(name, pages)}")
    print(pages[name], end="")
    return 0
