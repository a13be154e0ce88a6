"""Numbers and lists of names in words, for what is printed."""

from collections.abc import Iterable


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun: "1 client", "2 clients"."""
    if count != 1:
        noun = plural or f"{noun}s"
    return f"{count} {noun}"


def size_text(size: float) -> str:
    """Return a number of bytes in readable units."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"


def first_few(names: Iterable[object], most: int = 6) -> str:
    """Return the first names with commas between them, and ", …" if there are more than `most`."""
    words = list(map(str, names))
    text = ", ".join(words[:most])
    if len(words) > most:
        text += ", …"
    return text
