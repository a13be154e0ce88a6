"""Which files are the user's own code."""

import functools
import os
import sysconfig
from pathlib import Path

_RAYFED = Path(__file__).parents[1]


@functools.cache
def is_user_file(file: str) -> bool:
    """Return whether `file` belongs neither to rayfed, nor to Python, nor to an installed package."""
    path, real = Path(file), Path(os.path.realpath(file))
    if {"site-packages", "dist-packages"} & {*path.parts, *real.parts}:
        return False
    paths = sysconfig.get_paths()
    folders = (paths["stdlib"], paths["platstdlib"], _RAYFED)
    return not any(real.is_relative_to(os.path.realpath(folder)) for folder in folders)
