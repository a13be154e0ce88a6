"""Damage to files, as disks, broken downloads and editors do it, drawn by hypothesis."""

from pathlib import Path

from hypothesis import strategies as st

from rayfed.core.errors import UsageError


@st.composite
def damages(draw):
    """Draw a function from the bytes of a file to damaged ones."""
    kind = draw(st.sampled_from(["cut", "flip", "insert", "zero", "replace", "double"]))
    place, width = draw(st.floats(0, 1)), draw(st.integers(1, 64))
    content = draw(st.binary(min_size=1, max_size=64))

    def damaged(whole: bytes) -> bytes:
        start = min(int(place * len(whole)), max(0, len(whole) - 1))
        end = start + width
        return {
            "cut": whole[:start],
            "flip": whole[:start] + bytes(byte ^ 0x5A for byte in whole[start:end]) + whole[end:],
            "insert": whole[:start] + content + whole[start:],
            "zero": whole[:start] + bytes(len(whole[start:end])) + whole[end:],
            "replace": content,
            "double": whole + whole,
        }[kind]

    damaged.__qualname__ = f"{kind}({place:.3f}, {width}, {content!r})"  # what a failing example shows
    return damaged


def in_one_line(error: Exception) -> str:
    """Return the message of a refusal; fail if it is none, or has several lines."""
    assert isinstance(error, UsageError)
    message = str(error)
    assert message.strip()
    assert "\n" not in message
    return message


def files_below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())
