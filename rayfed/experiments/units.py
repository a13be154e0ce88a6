"""Numbers in words, for what is printed."""


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
