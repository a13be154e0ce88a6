"""Signs for output that cannot show all of Unicode, such as a log in Latin-1: substitutes in place of an error."""

import codecs
import contextlib
import re
import sys
import unicodedata

_HANDLER = "rayfed.substitutes"
_ALIKE = {"─━╸╺–—−·•": "-", "│┃": "|", "┼┌┐└┘├┤┬┴": "+", "‘’": "'", "“”": '"', "⌊⌈": "[", "⌋⌉": "]"}
_SIGNS = {
    "±": "+-",
    "×": "x",
    "½": "1/2",
    "°": "deg",
    "µ": "u",
    "†": "*",
    "…": "...",
    "←": "<-",
    "→": "->",
    "≤": "<=",
    "≥": ">=",
    "≠": "!=",
    "∈": "in",
    "∇": "grad ",
    "∂": "d",
    "∘": "o",
    "√": "sqrt",
    "‖": "||",
    "⟨": "<",
    "⟩": ">",
    "✓": "x",
    "λ": "lambda",  # which Unicode calls lamda
    "\u0303": "_tilde",
    "\u0304": "_bar",
    "\u2800": " ",  # a Braille pattern without dots
}
for _signs, _plain in _ALIKE.items():
    _SIGNS.update(dict.fromkeys(_signs, _plain))
_GREEK = "GREEK SMALL LETTER ", "GREEK CAPITAL LETTER "


def substitute(sign: str) -> str:
    """Return what stands for a sign in ASCII, such as the name of a Greek letter, or a question mark."""
    if sign in _SIGNS:
        return _SIGNS[sign]
    name = unicodedata.name(sign, "")
    small, capital = (name.removeprefix(prefix) for prefix in _GREEK)
    if name != small:
        return small.lower()
    if name != capital:
        return capital.capitalize()
    plain = unicodedata.normalize("NFKD", sign).encode("ascii", "ignore").decode()
    if name.startswith("SUPERSCRIPT "):
        return f"^{plain or '-'}"
    if plain.isalnum():
        return plain
    return "?"


def _substitutes(error: UnicodeError) -> tuple[str, int]:
    """Return substitutes for what cannot be encoded, as `codecs.register_error` wants them."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    wrong = error.object[error.start : error.end]
    text = "".join(map(substitute, wrong))
    return re.sub(r"(\^[-+\d]+)\^", r"\1", text), error.end  # one ^ for an exponent of several signs


def print_substitutes() -> None:
    """Let standard output and standard error print substitutes for what they cannot encode."""
    codecs.register_error(_HANDLER, _substitutes)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):  # a stream of a notebook or of a test
            stream.reconfigure(errors=_HANDLER)  # type: ignore[union-attr]
