"""List the files of rayfed through which an image goes to its first gradient, and a sweep to its first round.

A run and a sweep are started as commands, all of whose processes watch their calls by `sys.setprofile`. Images are
arrays of 13 x 11, be they the reader's or what a plan makes up to try the model. A sweep is, in turn, an object of the
classes in `SWEEP`. A file is on the way if one of its functions is given such a value or returns one, as it is, in a
container or as an attribute of an object, before a host computes the first gradient; plans' own steps end no way. Files
that run at all are counted without what imports run.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import numpy as np

SIDES = (13, 11)
SWEEP = {"Namespace", "Space", "Config", "Given", "SweepPlan", "Plan", "Blueprint", "Simulation", "Server"}
SWEEP |= {"LocalFleet", "RayFleet", "Request", "ExchangeRequest", "Host", "Job"}
OPTIONS = ("data.name=npz", "model.name=mlp", "local.lr=0.1", "placement.cpus=0.5")
SPACE = "experiment: ways\nsearch: {max_concurrent: 1}\narms: [{algorithm.name: fedavg}, {algorithm.name: fedprox}]\n"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=1, help="Ray hosts of the sweep; 0 runs it without Ray")
    parser.add_argument("--rounds", type=int, default=1, help="rounds of both commands; the ways end in the first")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        images, space = Path(folder, "images.npz"), Path(folder, "space.yaml")
        number, pixels = np.arange(40), np.random.default_rng(0).integers(0, 256, (40, *SIDES), np.uint8)
        np.savez(images, images=pixels, labels=number % 2, client=number // 10, is_test=number % 5 == 0)
        space.write_text(SPACE)
        options = (*OPTIONS, f"data.file={images}", f"rounds={args.rounds}", f"results={folder}/results")
        show("image -> gradient", "image", seen_in(folder, "run", *options, "placement.hosts=0"))
        sweep = seen_in(folder, "sweep", str(space), *options, f"placement.hosts={args.hosts}")
        show("sweep -> first round", "sweep", sweep)


def show(title: str, kind: str, seen: Sequence[tuple[str, str]]) -> None:
    files = [file for what, file in seen if what == kind]
    running = sum(what == "run" for what, _ in seen)
    print(f"{title}: {len(files)} files; {running} files run", *files, sep="\n  ")


def seen_in(folder: str, *arguments: str) -> list[tuple[str, str]]:
    """Run a command of rayfed, and return what its processes saw before the first gradient, in that order."""
    with tempfile.TemporaryDirectory(dir=folder) as notes:
        start = "import sys, ways\nways.watch()\ndel sys.modules['ways']\n"  # else it would be a user's module
        Path(notes, "sitecustomize.py").write_text(start)  # each Python process imports it
        paths = [notes, str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        own = {"PYTHONPATH": os.pathsep.join(paths), "RAYFED_CACHE": notes, "WAYS": notes}
        command = [sys.executable, "-m", "rayfed", *arguments]
        subprocess.run(command, env=os.environ | own, check=True, capture_output=True)
        lines = sorted(line.split() for path in Path(notes).glob("*.seen") for line in path.read_text().splitlines())
    end = next(place for place, (_, what, _) in enumerate(lines) if what == "gradient")
    return list(dict.fromkeys((what, file) for _, what, file in lines[:end]))


def watch() -> None:
    """Note for each file of rayfed when a function of it is first called, and first given or returning each value."""
    path, known = Path(os.environ["WAYS"], f"{os.getpid()}.seen"), set[tuple[str, str]]()

    def note(what: str, file: str) -> None:
        if not what or (what, file) in known:
            return
        known.add((what, file))
        with path.open("a") as notes:
            notes.write(f"{time.time():.6f} {what} {file}\n")

    def look(frame: FrameType, event: str, returned: Any) -> None:
        code = frame.f_code
        _, inside, file = code.co_filename.rpartition("/rayfed/")
        differentiates = code.co_filename.endswith("torch/autograd/__init__.py")
        if differentiates and any(call == ("engine/host.py", "exchange") for call in callers(frame)):
            note("gradient", "-")
        if not inside or event not in ("call", "return") or code.co_name == "<module>":
            return
        if not any(name == "_find_and_load" for _, name in callers(frame)):
            note("run", file)
        given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        values = [frame.f_locals.get(name) for name in given] if event == "call" else [returned]
        for kind in {kind_of(item) for value in values for item in held(value)}:
            note(kind, file)

    sys.setprofile(look)


def callers(frame: FrameType | None) -> Iterator[tuple[str, str]]:
    while frame is not None:
        yield frame.f_code.co_filename.rpartition("/rayfed/")[2], frame.f_code.co_name
        frame = frame.f_back


def kind_of(value: Any) -> str:
    if hasattr(type(value), "dtype") and getattr(value, "shape", ())[-2:] == SIDES:
        return "image"
    return "sweep" if type(value).__name__ in SWEEP else ""


def held(value: Any, containers: int = 2, objects: int = 1) -> Iterator[Any]:
    yield value
    if isinstance(value, (tuple, list, dict)):
        for item in list(value.values() if isinstance(value, dict) else value) if containers else ():
            yield from held(item, containers - 1, objects)
    elif objects and hasattr(value, "__dict__") and not isinstance(value, (type, ModuleType)):
        for item in list(vars(value).values()):
            yield from held(item, containers, objects - 1)


if __name__ == "__main__":
    main()
