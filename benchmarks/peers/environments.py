"""Virtual environments for engines that are not part of rayfed, made on demand and kept."""

import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).parent


class Unavailable(Exception):
    """An engine cannot be installed or run here; the message is one line."""


def environment(engine: str, cache: Path) -> Path:
    """Return the Python of the environment of `engine`, whose packages are listed in `<engine>.txt`.

    The environment is made in `cache`, and made anew when that list or this Python changes.

    Raises:
        Unavailable: The packages cannot be installed.
    """
    requirements = HERE / f"{engine}.txt"
    folder = cache.resolve() / engine
    python, stamp = folder / "bin" / "python", folder / ".installed"
    wanted = f"{sys.version}\n{requirements.read_text()}"
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"{engine}: installing into {folder}", flush=True)
    stamp.unlink(missing_ok=True)
    log = cache / f"{engine}-installation.log"
    cache.mkdir(parents=True, exist_ok=True)
    venv.EnvBuilder(with_pip=True, clear=True).create(folder)
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--requirement", str(requirements)]
    with log.open("w") as file:
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT)
    if done.returncode:
        raise Unavailable(f"{engine}: cannot be installed: {last_error(log)} (see {log})")
    stamp.write_text(wanted)
    return python


def last_error(log: Path) -> str:
    """Return the last line of `log` that looks like an error, or else the last line with text."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [
        line for line in lines if line.startswith("ERROR:") or line.split(":")[0].endswith(("Error", "Exception"))
    ]
    return (errors or lines or ["it printed nothing"])[-1][:200]
