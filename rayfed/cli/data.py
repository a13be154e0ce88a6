"""`rayfed data`: where the files of datasets come from, their sizes and licences, and whether they are here."""

import argparse

from rayfed.core.errors import UsageError
from rayfed.core.options import suggestion
from rayfed.core.registry import resolve
from rayfed.data.published import Source, sources
from rayfed.data.readers.files import ROOT_HELP, datasets_folder
from rayfed.data.sets import DATASETS

_DESCRIPTION = """\
Say where the files of published datasets come from, how large the downloads are, their licences, and whether they are
in the folder of datasets. Without a name, list all. Nothing is downloaded: data.download=true does that.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = _DESCRIPTION
    parser.add_argument("names", nargs="*", metavar="NAME", help="a dataset, such as mnist, or a source of this list")
    parser.add_argument("--root", metavar="FOLDER", help=ROOT_HELP)


def execute(options: argparse.Namespace) -> int:
    if not options.names:
        print(f"folder of datasets: {datasets_folder(options.root)}")
        for source in sources().values():
            if source.present(options.root):
                here = "here"
            elif source.by_hand:
                here = "by hand"
            else:
                here = "-"
            print(f"  {source.name:18}{source.size:>13}  {here:8} {source.licence}")
        print("rayfed data NAME says more. Other datasets are embedded, drawn, or your own files: rayfed list datasets")
        for name in packaged():
            kind = resolve(name, DATASETS, where="data.name")
            print(f"{name} comes with rayfed, under its own licence: {kind.licence}")
        return 0
    texts = []
    for name in options.names:
        texts.extend(_texts(name, options.root))
    print("\n\n".join(texts))
    return 0


def packaged() -> list[str]:
    """Return the names of the datasets whose files come with rayfed under a licence of their own."""
    return [name for name in DATASETS if hasattr(resolve(name, DATASETS, where="data.name"), "licence")]


def _texts(name: str, root: str | None) -> list[str]:
    """Return the description of each source of a dataset, or of the source called `name`."""
    known = sources()
    texts = []
    for source in known.values():
        if name in source.datasets:
            texts.append(_text(source, name, root))
    if texts:
        return texts
    if name in known:
        return [_text(known[name], name, root)]
    if name not in DATASETS:
        raise UsageError(f"{name}: no such dataset; {suggestion(name, [*known, *DATASETS])}")
    kind = resolve(name, DATASETS, where="data.name")
    if name in packaged():
        lines = [name, f"  page      {kind.page}", f"  licence   {kind.licence}", "  here      it comes with rayfed"]
        return ["\n".join(lines)]
    what = "reads your own files"
    if getattr(kind, "embedded", False):
        what = "needs no files"
    return [f"{name}: {what}, so there is nothing to download; rayfed list {name}"]


def _text(source: Source, dataset: str, root: str | None) -> str:
    if dataset not in source.datasets:
        dataset = source.datasets[0]
    lines = [
        source.name,
        f"  page      {source.page}",
        f"  licence   {source.licence}",
        f"  read by   {', '.join(source.datasets)}",
        f"  contains  {source.expected}",
    ]
    words = ["rayfed partition", f"data.name={dataset}", source.options, "data.download=true"]
    how = " ".join(filter(None, words))
    if source.by_hand:
        lines = [*lines, f"  by hand   {source.by_hand}"]
        how = "put the files there"
    else:
        lines.append(f"  download  {source.size} from {source.address}")
    place = source.present(root)
    if place:
        return "\n".join([*lines, f"  here      {place}"])
    lines += [f"  missing   {source.home(root)}", f"  get it    {how}"]
    return "\n".join(lines)
