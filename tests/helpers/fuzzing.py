"""Files of somebody else, made hostile at random: each is read, or refused in one line, with little memory and time.

    python -m helpers.fuzzing FOLDER COUNT SEED FIRST READER...

changes `COUNT` files of each reader of `helpers.hostile_files`, one after the other, has it read them, and prints a
line of JSON for each, from the input number FIRST on. `fuzz` runs that, starts it again behind an input that ended it,
and returns what came of all inputs.
"""

import contextlib
import dataclasses
import json
import os
import random
import resource
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from helpers.hostile_files import READERS, SOURCES, Reader
from helpers.watcher import fingerprint, written
from rayfed.core.errors import BadHook, Diverged, HostLost, StorageError, UsageError

SECONDS = 10
"""The seconds of the processor that an input may take."""
MEMORY = 3 * 2**30
"""The bytes of addresses that a process may use beside those that it uses once it has read valid files."""
_PATIENCE = 12 * SECONDS
"""The seconds of the clock that an input may take."""
_PATIENCE_AT_FIRST = 300.0
_REFUSALS = (UsageError, StorageError, Diverged, BadHook, HostLost)
"""What commands print in one line."""
_READY = "ready"


class Input(NamedTuple):
    """A reader's input of a number, from which it is made."""

    reader: str
    number: int


@dataclasses.dataclass
class Found:
    """What came of the inputs of a reader: how many were read and refused, and a line on each other one.

    Attributes:
        reasons: The lines that refused inputs, which begin alike.
        seconds: The time of the processor that the inputs took.
    """

    read: int = 0
    refused: int = 0
    faults: list[str] = dataclasses.field(default_factory=list)
    reasons: Counter[str] = dataclasses.field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def tried(self) -> int:
        return self.read + self.refused + len(self.faults)

    def add(self, answer: dict[str, Any]) -> None:
        """Add what came of an input, as `_answer` returns it."""
        kind, line = answer["kind"], answer["line"]
        self.seconds += answer["seconds"]
        if kind == "read":
            self.read += 1
        elif kind == "refused":
            self.refused += 1
            self.reasons[line[:60]] += 1
        else:
            self.faults.append(f"input {answer['number']}: {kind}: {line}")


def fuzz(names: Sequence[str], count: int, folder: Path, seed: int = 0) -> Iterator[tuple[str, Found]]:
    """Have readers read `count` hostile inputs each, or their shares of it; yield what came of them, reader by reader.

    Readers may write to `folder` only.

    Raises:
        RuntimeError: Valid files are not read.
    """
    inputs = all_inputs(names, count)
    left = Counter(reader for reader, _ in inputs)
    found = {name: Found() for name in names}
    for (reader, _), answer in zip(inputs, _answers(inputs, [str(folder), str(count), str(seed)], names), strict=True):
        found[reader].add(answer)
        left[reader] -= 1
        if not left[reader]:
            yield reader, found[reader]


def _answers(inputs: Sequence[Input], arguments: Sequence[str], names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield what came of each input, as `_answer` returns it."""
    first = 0
    while first < len(inputs):
        ready = set()
        with tempfile.TemporaryFile() as printed, _started([*arguments, str(first), *names], printed) as process:
            for line in _lines(process):
                said = json.loads(line)
                if _READY in said:
                    ready.add(said[_READY])
                else:
                    yield said
                    first += 1
            code = process.wait()
            printed.seek(0)
            last = printed.read()[-2000:].decode(errors="replace")
        if code:
            reader, number = inputs[first]
            if reader not in ready:
                raise RuntimeError(f"{reader}: valid files are not read: {last}")
            yield {"number": number, "kind": f"ended by {code}", "line": last, "seconds": 0.0}
            first += 1


def all_inputs(names: Sequence[str], count: int) -> list[Input]:
    """Return the inputs of readers, in order."""
    inputs: list[Input] = []
    for name in names:
        tries = max(1, round(count * READERS[name].share))
        inputs += [Input(name, number) for number in range(tries)]
    return inputs


@contextlib.contextmanager
def _started(arguments: Sequence[str], printed: IO[bytes]) -> Iterator[subprocess.Popen[str]]:
    """Start this module, which writes its lines of JSON to a pipe, and whatever readers print to a file."""
    places = {"PYTHONPATH": str(Path(__file__).parents[1]), "MPLCONFIGDIR": arguments[0]}
    others = {"PYTHONDONTWRITEBYTECODE": "1", "RAYFED_CACHE": "/dev/null/none", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "helpers.fuzzing", *arguments]
    environment = os.environ | places | others
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=printed, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def _lines(process: subprocess.Popen[str]) -> Iterator[str]:
    """Yield the lines that a process prints; kill it when none comes for long, as it does not heed its alarm."""
    patience = _PATIENCE_AT_FIRST  # until it has imported everything, on a busy machine
    with selectors.DefaultSelector() as waiting:
        waiting.register(process.stdout, selectors.EVENT_READ)
        while waiting.select(patience):
            line = process.stdout.readline()
            if not line:
                return
            yield line
            patience = _PATIENCE_AT_FIRST if _READY in line else _PATIENCE
    process.kill()


# In the process that reads


def _main(folder: Path, count: int, seed: int, first: int, names: Sequence[str]) -> None:
    answers = os.fdopen(os.dup(1), "w")  # of its own: readers print, too
    os.dup2(2, 1)
    os.chdir(folder)
    for name in names:
        valid = _valid(folder, READERS[name].source)
        if not valid.exists():
            valid.mkdir()
            SOURCES[READERS[name].source](valid)
    changed = written()
    signal.signal(signal.SIGPROF, _too_slow)
    last = None
    for name, number in all_inputs(names, count)[first:]:
        reader = READERS[name]
        if name != last:
            _copy(folder, reader)
            reader.read(_work(folder))  # imports everything, and shows that valid files are read
            print(json.dumps({_READY: name}), file=answers, flush=True)
            _limit_memory()
            last = name
        rng = random.Random(f"{name} {number} {seed}")
        _make_hostile(folder, reader, rng)
        before = _outside(folder, reader)
        changed.clear()
        answer = _answer(reader, _work(folder))
        wrong = [path for path in changed if _is_outside(path, folder, reader)]
        if wrong or _outside(folder, reader) != before:
            answer |= {"kind": "wrote", "line": f"{wrong[:3]} {answer}"}
        print(json.dumps({"number": number, **answer}), file=answers, flush=True)


def _valid(folder: Path, source: str) -> Path:
    return folder / f"valid {source}"


def _work(folder: Path) -> Path:
    return folder / "work"


def _copy(folder: Path, reader: Reader) -> None:
    """Copy a reader's valid files to where it reads them."""
    shutil.rmtree(_work(folder), ignore_errors=True)
    shutil.copytree(_valid(folder, reader.source), _work(folder), symlinks=True)


def _make_hostile(folder: Path, reader: Reader, rng: random.Random) -> None:
    """Copy a reader's valid files to where it reads them, and change one of them."""
    _copy(folder, reader)
    files: list[Path] = []
    for pattern in reader.files:
        files += sorted(_work(folder).glob(pattern))
    file = rng.choice(files)
    file.write_bytes(reader.mutation(file.read_bytes(), rng))
    reader.mend(_work(folder))


def _outside(folder: Path, reader: Reader) -> object:
    """Return what changes when a reader writes where it may not."""
    names = sorted(os.listdir(folder))
    return names if reader.writes else (names, fingerprint(_work(folder)))


def _is_outside(path: str, folder: Path, reader: Reader) -> bool:
    """Return whether a reader may not write to `path`."""
    if path.startswith(("/dev/null", "/proc/self/")):
        return False
    return not (reader.writes and Path(path).is_relative_to(_work(folder)))


def _answer(reader: Reader, work: Path) -> dict[str, Any]:
    """Have a reader read the files in a folder, and return what came of it: a kind, a line and the seconds it took."""
    began = time.process_time()
    kind, line = _outcome(reader, work)
    return {"kind": kind, "line": line, "seconds": time.process_time() - began}


def _outcome(reader: Reader, work: Path) -> tuple[str, str]:
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        reader.read(work)
    except _REFUSALS as error:
        line = str(error)
        if not line.isprintable():
            return "not one line", repr(line[:300])
        return "refused", line.replace(str(work), "")
    except _TooSlow:
        return "slow", traceback.format_exc()[-300:]
    except BaseException as error:
        return "traceback", f"{type(error).__name__} at {_place(error)}: {str(error)[:150]}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return "read", ""


def _place(error: BaseException) -> str:
    """Return the innermost line of rayfed that an error went through."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/rayfed/" in frame.filename]
    if not frames:
        return "?"
    return f"{frames[-1].filename.rpartition('/rayfed/')[2]}:{frames[-1].lineno}"


class _TooSlow(BaseException):
    """Raised when an input has taken its time."""


def _too_slow(number: int, frame: Any) -> None:
    raise _TooSlow


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    _main(Path(sys.argv[1]), *map(int, sys.argv[2:5]), sys.argv[5:])
