"""Readers and hostile inputs: each input is read, or refused in one line, in a process with little memory and time.

    python -m helpers.fuzzing READER FIRST COUNT SEED FOLDER

reads the inputs FIRST to FIRST + COUNT - 1 of a reader, and prints a line of JSON for each. `fuzz` runs that, starts it
again behind an input that ended it, and returns what came of all inputs.
"""

import bz2
import contextlib
import dataclasses
import io
import json
import os
import random
import resource
import selectors
import shutil
import signal
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from helpers import mutations
from helpers.watcher import fingerprint, written

SECONDS = 10
"""The seconds of the processor that an input may take."""
MEMORY = 3 * 2**30
"""The bytes of addresses that a process may use beside those that it uses once it has imported everything."""
READY = "ready\n"
_FIXED_SEED = 20_261_127

Mutation = Callable[[bytes, random.Random], bytes]


@dataclasses.dataclass(frozen=True)
class Reader:
    """What reads a file of somebody else.

    Attributes:
        make: Writes valid files into a folder.
        read: Reads them.
        files: Globs of the files of which one is changed.
        mutation: Changes the bytes of a file.
        share: The share of the inputs that are tried, of a reader that is slow.
    """

    make: Callable[[Path], None]
    read: Callable[[Path], object]
    files: tuple[str, ...]
    mutation: Mutation
    share: float = 1.0


@dataclasses.dataclass
class Found:
    """What came of the inputs of a reader: how many were read and refused, and a line on each other one."""

    read: int = 0
    refused: int = 0
    faults: list[str] = dataclasses.field(default_factory=list)
    reasons: Counter[str] = dataclasses.field(default_factory=Counter)

    @property
    def tried(self) -> int:
        return self.read + self.refused + len(self.faults)


def fuzz(name: str, count: int, folder: Path, seed: int = 0) -> Found:
    """Read `count` hostile inputs of a reader, or its share of them, in processes that start in `folder`."""
    found, first = Found(), 0
    count = max(1, round(count * READERS[name].share))
    while first < count:
        command = [
            sys.executable,
            "-m",
            "helpers.fuzzing",
            name,
            str(first),
            str(count - first),
            str(seed),
            str(folder),
        ]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "PYTHONDONTWRITEBYTECODE": "1"}
        environment |= {"RAYFED_CACHE": "/dev/null/none", "MPLCONFIGDIR": str(folder)}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        is_ready = False
        for line in _lines(process):
            is_ready = is_ready or line == READY
            if not line.startswith("{"):
                continue  # what a reader prints
            answer = json.loads(line)
            first = answer["input"] + 1
            if answer["kind"] == "read":
                found.read += 1
            elif answer["kind"] == "refused":
                found.refused += 1
                found.reasons[answer["line"][:60]] += 1
            else:
                found.faults.append(f"{name} {answer['input']}: {answer['kind']}: {answer['line']}")
        code, printed = process.wait(), process.stderr.read()[-500:]
        process.stderr.close()
        process.stdout.close()
        if not is_ready:
            raise RuntimeError(f"{name}: valid files are not read: {printed}")
        if code:
            found.faults.append(f"{name} {first}: ended by {code}: {printed!r}")
            first += 1
    return found


def _lines(process: subprocess.Popen[str]) -> Iterator[str]:
    """Yield the lines that a process prints; kill it when none comes for long, as it does not heed its alarm."""
    with selectors.DefaultSelector() as waiting:
        waiting.register(process.stdout, selectors.EVENT_READ)
        patience = 120 * SECONDS  # until it has imported everything, on a busy machine
        while True:
            if not waiting.select(patience):
                process.kill()
                return
            patience = 12 * SECONDS  # of the clock
            line = process.stdout.readline()
            if not line:
                return
            yield line


def _main(name: str, first: int, count: int, seed: int, folder: Path) -> None:
    reader = READERS[name]
    valid, work = folder / f"valid-{name}", folder / f"work-{name}"
    if not valid.exists():
        valid.mkdir(parents=True)
        reader.make(valid)
    os.chdir(folder)
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(valid, work, symlinks=True)
    reader.read(work)  # imports everything, and shows that valid files are read
    print(READY, end="")
    changed = written()
    _limit_memory()
    signal.signal(signal.SIGPROF, _too_slow)
    files = sorted(path for glob in reader.files for path in valid.glob(glob))
    for number in range(first, first + count):
        rng = random.Random(f"{name} {number} {seed} {_FIXED_SEED}")
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(valid, work, symlinks=True)
        file = work / rng.choice(files).relative_to(valid)
        file.write_bytes(reader.mutation(file.read_bytes(), rng))
        before = fingerprint(folder)
        changed.clear()
        answer = _outcome(reader, work)
        outside = [path for path in changed if not path.startswith("/dev/null")]
        if outside or fingerprint(folder) != before:
            answer = {"kind": "wrote", "line": f"{outside[:3]} {answer}"}
        print(json.dumps({"input": number, **answer}), flush=True)


def _outcome(reader: Reader, work: Path) -> dict[str, str]:
    """Read the files in a folder, and return what came of it."""
    from rayfed.core.errors import BadHook, Diverged, HostLost, StorageError, UsageError

    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        reader.read(work)
    except (UsageError, StorageError, Diverged, BadHook, HostLost) as error:
        line = str(error)
        if "\n" in line or not line.isprintable():
            return {"kind": "not one line", "line": line[:300]}
        return {"kind": "refused", "line": line.replace(str(work), "")}
    except _TooSlow:
        return {"kind": "slow", "line": traceback.format_exc()[-300:]}
    except BaseException as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/rayfed/" in frame.filename]
        place = f"{frames[-1].filename.rpartition('/rayfed/')[2]}:{frames[-1].lineno}" if frames else "?"
        return {"kind": "traceback", "line": f"{type(error).__name__} at {place}: {str(error)[:150]}"}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return {"kind": "read", "line": ""}


class _TooSlow(BaseException):
    """Raised when an input has taken its time."""


def _too_slow(number: int, frame: Any) -> None:
    raise _TooSlow


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


# The readers

RUN = {
    "algorithm.name": "scaffold",
    "data": {"domains": ["plain", "font"], "per_domain": 20},
    "model": {"name": "mlp", "hidden": [4]},
    "local.batch_size": 4,
    "rounds": 2,
    "metrics.tsne": True,
}


def _results(folder: Path) -> None:
    import rayfed

    for experiment, more in {"e": {}, "f": {"seed": 1, "algorithm.name": "fedavg"}}.items():
        rayfed.run({**RUN, **more, "results": str(folder), "experiment": experiment}, quiet=True)


def _report(folder: Path) -> None:
    from rayfed.reports.read import read, read_events
    from rayfed.reports.render import FORMATS, render
    from rayfed.reports.summary import View

    tables = read(folder)
    read_events(folder)
    for kind in FORMATS:
        text = render(folder, format=kind, tables=tables, width=100)
        assert not set(text) & set("\x1b\r\x07"), "characters of control"
        if kind == "latex":
            live = [line for line in text.splitlines() if "\\input{" in line and not line.startswith("%")]
            assert not live, live
    render(folder, view=View(rule="final"), tables=tables)


def _page(folder: Path) -> None:
    from rayfed.reports.page import page_html

    page_html(folder)


def _saved_states(folder: Path) -> None:
    import rayfed

    for experiment in ("e", "f"):
        (row,) = (folder / experiment / "trials" / ".rows").glob("*.json")
        result = rayfed.load(str(folder), experiment, row.stem)
        result.server, list(result.clients.values()), result.model(), result.model(round="selected")


def _resumed(folder: Path) -> None:
    import rayfed

    rayfed.run({**RUN, "rounds": 3, "resume": True, "results": str(folder), "experiment": "e"}, quiet=True)


def _manifest(whole: bytes, rng: random.Random) -> bytes:
    """Return a manifest with other fields, of which the checksum is right."""
    from rayfed.records import checkpoints

    if rng.random() < 0.1:
        return mutations.mutated_json(whole, rng)
    content = mutations.mutated_value(json.loads(whole)["content"], rng)
    try:
        return checkpoints._encoded(content)
    except (UnicodeEncodeError, ValueError):
        return mutations.dumped(content)


def _states_with_checksums(folder: Path) -> None:
    """Read states of which the checksums in the manifests are right."""
    from rayfed.records import checkpoints

    for manifest in folder.glob("*/checkpoints/*/manifest-*.json"):
        content = json.loads(manifest.read_bytes())["content"]
        for name, part in [("server", content["server"]), *content["clients"].items()]:
            state = (manifest.parent / f"{name}-{part[0]:06d}.pt").read_bytes()
            part[1:] = [len(state), checkpoints.checksum(state)]
        manifest.write_bytes(checkpoints._encoded(content))
    _saved_states(folder)


def _claims(folder: Path) -> None:
    from rayfed.records.trials import claimed

    with claimed(folder, "e", ["other"]):
        pass


def _owner(folder: Path) -> None:
    owners = folder / "e" / ".owners"
    owners.mkdir(parents=True)
    name = "host 1 2026-01-01T00:00:00 deadbeef"
    (owners / "deadbeef.json").write_text(json.dumps({"owner": name, "trials": ["a"]}))
    (owners / "deadbeef.lock").touch()


def _dataset(name: str, **options: Any) -> Callable[[Path], object]:
    """Return the reader of a dataset, of which `options` with {} are in the folder."""

    def read(folder: Path) -> None:
        from rayfed.data.loading import load

        filled = {
            key: value.replace("{}", str(folder)) if isinstance(value, str) else value for key, value in options.items()
        }
        population = load(name, filled)
        for client in population.clients:
            client.train.x[:], client.test.x[:]

    return read


def _make_npz(folder: Path) -> None:
    images = np.arange(24 * 2 * 3, dtype=np.uint8).reshape(24, 2, 3)
    arrays = {
        "images": images,
        "labels": np.arange(24) % 3,
        "client": np.arange(24) % 2,
        "is_test": np.arange(24) % 4 == 0,
    }
    np.savez(folder / "x.npz", **arrays)


def _make_images(folder: Path) -> None:
    from PIL import Image

    rng = np.random.default_rng(0)
    for title in "ab":
        (folder / "x" / title).mkdir(parents=True)
        for number, ending in enumerate(
            ("png", "jpg", "gif", "bmp", "tif", "webp", "ppm", "tga", "jp2", "ico", "png", "png")
        ):
            image = Image.fromarray(rng.integers(0, 256, (9, 9, 3), dtype=np.uint8))
            image.save(folder / "x" / title / f"{number}.{ending}")


def _make_table(folder: Path, ending: str) -> None:
    import pandas as pd

    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "a": rng.normal(size=30),
            "b": rng.integers(0, 9, 30),
            "label": [f"c{k % 3}" for k in range(30)],
            "client": np.arange(30) % 3,
            "domain": [f"d{k % 3 % 2}" for k in range(30)],
            "split": [("train", "test")[k % 5 == 0] for k in range(30)],
        }
    )
    if ending == "csv":
        frame.to_csv(folder / "x.csv", index=False)
    else:
        frame.to_parquet(folder / "x.parquet", index=False)


def _make_encoded_images(folder: Path) -> None:
    import pandas as pd
    from PIL import Image

    rng, cells = np.random.default_rng(0), []
    for number in range(20):
        out = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)).save(out, ("png", "jpeg")[number % 2])
        cells.append({"bytes": out.getvalue(), "path": None})
    pd.DataFrame({"image": cells, "label": np.arange(20) % 4}).to_parquet(folder / "x.parquet")


def _make_hub(folder: Path) -> None:
    """Write the files of `datasets.save_to_disk`: a list of splits, and for each a list of Arrow files."""
    import pyarrow as pa

    (folder / "x").mkdir()
    (folder / "x" / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    for split in ("train", "test"):
        home = folder / "x" / split
        home.mkdir()
        rows = pa.table({"a": pa.array(np.arange(20.0)), "label": pa.array(np.arange(20) % 3)})
        with (
            pa.OSFile(str(home / "data-00000-of-00001.arrow"), "wb") as file,
            pa.ipc.new_stream(file, rows.schema) as out,
        ):
            out.write_table(rows)
        state = {
            "_data_files": [{"filename": "data-00000-of-00001.arrow"}],
            "_split": split,
            "_indices_data_files": None,
        }
        (home / "state.json").write_text(json.dumps(state))


def _json_or_bytes(whole: bytes, rng: random.Random) -> bytes:
    return mutations.mutated_json(whole, rng) if whole[:1] == b"{" else mutations.mutated_bytes(whole, rng)


def _make_partition(folder: Path) -> None:
    from rayfed.data.loading import load_partitioned
    from rayfed.data.partitions.file import save

    save(*load_partitioned("mini_digits", {"per_domain": 20, "domains": ["plain", "font"]}), folder / "x.parquet")


def _read_partition(folder: Path) -> None:
    from rayfed.data.loading import load_partitioned
    from rayfed.data.partitions.summary import describe

    options = {"file": str(folder / "x.parquet")}
    found = load_partitioned("mini_digits", {"per_domain": 20, "domains": ["plain", "font"]}, "file", options)
    assert describe(*found).replace("\n", " ").isprintable(), "characters of control"


def _make_profile(folder: Path) -> None:
    import pandas as pd

    frame = pd.DataFrame(
        {
            "client": range(4),
            "steps_per_second": [1.0, 2.5, 100, 7],
            "up_mbps": [1, None, 3, 4],
            "down_mbps": [1.5, 2, 3, 4],
            "available": ["0-3600", "0-10 20-30", None, "5-6"],
        }
    )
    frame.to_csv(folder / "x.csv", index=False)
    frame.to_parquet(folder / "x.parquet", index=False)


def _read_profile(folder: Path) -> None:
    from rayfed.engine.clock import read_profile

    for file in ("x.csv", "x.parquet"):
        read_profile(str(folder / file), range(4))


def _table_or_text(whole: bytes, rng: random.Random) -> bytes:
    is_parquet = whole[:4] == b"PAR1"
    return mutations.mutated_parquet(whole, rng) if is_parquet else mutations.mutated_text(whole, rng)


CONFIGURATION = """\
base: &base {lr: 0.1, batch_size: 4}
experiment: night
seeds: [0, 1]
search: {kind: grid}
rounds: 3
data: {name: mini_digits, domains: [plain, font], per_domain: 20}
model: {name: mlp, hidden: [8]}
partition: {name: dirichlet, alpha: 0.5, seed: 3}
metrics: {f1: true}
arms:
  - algorithm.name: fedavg
    local: {<<: *base, momentum: 0.9}
  - algorithm: {name: fedprox, mu: {grid: [0.1, 1]}}
  - {algorithm.name: scaffold, local.lr: {grid: [0.01, 0.1]}}
"""


def _read_space(folder: Path) -> None:
    from rayfed.core.errors import UsageError
    from rayfed.experiments.config import Config
    from rayfed.experiments.sources import from_arguments, from_file
    from rayfed.experiments.space import configurations, read_space

    values = from_file(folder / "x.yaml")
    values.pop("base", None)
    for config in configurations(read_space(values)):
        config.tree()
    pairs = [line.replace(": ", "=", 1) for line in (folder / "x.yaml").read_text(errors="replace").splitlines()]
    for pair in pairs:
        with contextlib.suppress(UsageError):
            Config.read(from_arguments([pair]))


def _make_usps(folder: Path) -> None:
    lines = [
        f"{row % 10 + 1} " + " ".join(f"{k + 1}:{(k * row % 7) / 3.5 - 1:.4f}" for k in range(256)) for row in range(12)
    ]
    for name in ("usps.bz2", "usps.t.bz2"):
        (folder / name).write_bytes(bz2.compress("\n".join(lines).encode() + b"\n"))


def _read_usps(folder: Path) -> None:
    from rayfed.data.sets.digits5 import read_usps

    for name, side in (("usps.bz2", "train"), ("usps.t.bz2", "test")):
        read_usps(folder / name, side)


def _libsvm(whole: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.2:
        return mutations.mutated_bytes(whole, rng)
    return bz2.compress(mutations.mutated_text(bz2.decompress(whole), rng))


def _make_mat(folder: Path) -> None:
    import scipy.io

    images = np.arange(32 * 32 * 3 * 2, dtype=np.uint64).astype(np.uint8).reshape(32, 32, 3, 2)
    for name, packed in (("x.mat", True), ("y.mat", False)):
        scipy.io.savemat(folder / name, {"X": images, "y": np.array([[1], [10]])}, do_compression=packed)


def _read_mat(folder: Path) -> None:
    from rayfed.data.sets.digits5 import read_mat

    for name in ("x.mat", "y.mat"):
        read_mat(folder / name, "train")


def _make_tensors(folder: Path) -> None:
    import torch

    torch.save((torch.zeros(3, 28, 28, 3, dtype=torch.uint8), torch.arange(3)), folder / "x.pt")


def _read_tensors(folder: Path) -> None:
    from rayfed.data.sets.digits5 import read_mnist_m_tensors

    read_mnist_m_tensors(folder / "x.pt", "train")


def _written(name: str) -> Callable[[Path], None]:
    """Return what writes a published dataset, small."""

    def make(folder: Path) -> None:
        from helpers import image_sets

        image_sets.WRITERS[name](folder)

    return make


def _make_news_and_signals(folder: Path) -> None:
    from helpers.text_and_sensors import write_har, write_news

    write_news(folder)
    write_har(folder, people=(1, 3), windows=6)


def _read_news(folder: Path) -> None:
    _dataset("ag_news", root="{}")(folder)
    _dataset("uci_har", root="{}")(folder)


def _make_weights(folder: Path) -> None:
    import rayfed

    rayfed.run({**RUN, "results": str(folder / "r")}, quiet=True).save(folder / "x")
    shutil.rmtree(folder / "r")


def _read_weights(folder: Path) -> None:
    from rayfed.experiments.config import Config
    from rayfed.experiments.plan import make_plan

    make_plan(Config.read(RUN, {"model.weights": str(folder / "x")}))


READERS: dict[str, Reader] = {
    "rows": Reader(_results, _report, ("*/trials/.rows/*.json",), mutations.mutated_json),
    "tables": Reader(
        _results,
        _report,
        ("*/metrics/*.parquet", "*/rounds/*.parquet", "*/partitions/*.parquet", "*/maps/*.parquet"),
        mutations.mutated_parquet,
    ),
    "rows on a page": Reader(_results, _page, ("*/trials/.rows/*.json",), mutations.mutated_json, share=0.02),
    "tables on a page": Reader(
        _results,
        _page,
        ("*/metrics/*.parquet", "*/rounds/*.parquet", "*/partitions/*.parquet", "*/maps/*.parquet"),
        mutations.mutated_parquet,
        share=0.02,
    ),
    "owners": Reader(_owner, _claims, ("*/.owners/*.json",), mutations.mutated_json),
    "manifests": Reader(_results, _saved_states, ("*/checkpoints/*/*.json",), _manifest),
    "states": Reader(_results, _states_with_checksums, ("*/checkpoints/*/*.pt",), mutations.mutated_bytes),
    "npz": Reader(_make_npz, _dataset("npz", file="{}/x.npz"), ("x.npz",), mutations.mutated_npz),
    "idx": Reader(_written("mnist"), _dataset("mnist", root="{}"), ("MNIST/raw/*",), mutations.mutated_idx),
    "cifar": Reader(
        _written("cifar10"), _dataset("cifar10", root="{}"), ("cifar-10-batches-py/*",), mutations.mutated_pickle
    ),
    "libsvm": Reader(_make_usps, _read_usps, ("*.bz2",), _libsvm),
    "mat": Reader(_make_mat, _read_mat, ("*.mat",), mutations.mutated_bytes),
    "tensors": Reader(_make_tensors, _read_tensors, ("x.pt",), mutations.mutated_bytes),
    "yaml": Reader(
        lambda folder: _write(folder / "x.yaml", CONFIGURATION), _read_space, ("x.yaml",), mutations.mutated_yaml
    ),
    "profiles": Reader(_make_profile, _read_profile, ("x.*",), _table_or_text),
    "partitions": Reader(_make_partition, _read_partition, ("x.parquet",), mutations.mutated_parquet),
    "csv": Reader(
        lambda folder: _make_table(folder, "csv"),
        _dataset("csv", file="{}/x.csv", label="label", client="client", domain="domain", split="split"),
        ("x.csv",),
        mutations.mutated_text,
    ),
    "parquet": Reader(
        lambda folder: _make_table(folder, "parquet"),
        _dataset("parquet", file="{}/x.parquet", label="label", client="client", domain="domain", split="split"),
        ("x.parquet",),
        mutations.mutated_parquet,
    ),
    "encoded images": Reader(
        _make_encoded_images,
        _dataset("parquet", file="{}/x.parquet", features=["image"], label="label", size=8),
        ("x.parquet",),
        mutations.mutated_parquet,
    ),
    "hub": Reader(
        _make_hub,
        _dataset("huggingface", folder="{}/x", features=["a"], label="label"),
        ("x/*.json", "x/*/*"),
        _json_or_bytes,
    ),
    "images": Reader(_make_images, _dataset("imagefolder", folder="{}/x", size=8), ("x/*/*",), mutations.mutated_bytes),
    "texts and signals": Reader(_make_news_and_signals, _read_news, ("*/*/*.txt", "AG_NEWS/data/*"), _table_or_text),
    "weights": Reader(_make_weights, _read_weights, ("x/*.safetensors",), mutations.mutated_bytes),
}
"""Everything that reads files of somebody else, by name."""


def _write(path: Path, text: str) -> None:
    path.write_text(text)


if __name__ == "__main__":
    _main(sys.argv[1], *map(int, sys.argv[2:5]), Path(sys.argv[5]))
