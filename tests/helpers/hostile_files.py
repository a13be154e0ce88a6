"""What reads files of somebody else, and valid files for it, which `helpers.fuzzing` changes."""

import bz2
import contextlib
import dataclasses
import functools
import io
import json
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from helpers import mutations
from helpers.mnist_files import write_mnist
from rayfed.data.sets.cifar import Cifar10
from rayfed.records import checkpoint_store

if TYPE_CHECKING:
    import pandas as pd

    from rayfed.data.dataset import ClientRows, Dataset

Mutation = Callable[[bytes, random.Random], bytes]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reader:
    """What reads a file of somebody else.

    Attributes:
        source: The key of `SOURCES` that writes valid files.
        read: Reads the files in a folder.
        files: Globs of the files. One of them is changed.
        mutation: Returns changed bytes of a file.
        mend: Puts right what would hide the change from most of the reader, such as checksums.
        share: The share of the inputs that are tried with a reader that is slow.
        writes: Whether the reader may write into the folder that it reads.
    """

    source: str
    read: Callable[[Path], object]
    files: tuple[str, ...]
    mutation: Mutation
    mend: Callable[[Path], None] = lambda folder: None
    share: float = 1.0
    writes: bool = False


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


def _report(kind: str) -> Callable[[Path], object]:
    """Return what prints a report in the format `kind`."""

    def read(folder: Path) -> None:
        from rayfed.reports.render import render

        text = render(folder, format=kind, width=100)
        assert not set(text) & set("\x1b\r\x07"), "characters of control"
        if kind == "latex":
            live = [line for line in text.splitlines() if "\\input{" in line and not line.startswith("%")]
            assert not live, live

    return read


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
    if rng.random() < 0.1:
        return mutations.mutated_json(whole, rng)
    content = mutations.mutated_value(json.loads(whole)["content"], rng)
    try:
        return checkpoint_store._encoded(content)
    except (UnicodeEncodeError, ValueError):
        return mutations.dumped(content)


def _with_checksums(folder: Path) -> None:
    """Write the sizes and checksums of all states into the manifests that name them."""
    for manifest in folder.glob("*/checkpoints/*/manifest-*.json"):
        with contextlib.suppress(Exception):  # of a manifest that is changed
            content = json.loads(manifest.read_bytes())["content"]
            for name, part in [("server", content["server"]), *content["clients"].items()]:
                state = (manifest.parent / f"{name}-{part[0]:06d}.pt").read_bytes()
                part[1:] = [len(state), checkpoint_store.checksum(state)]
            manifest.write_bytes(checkpoint_store._encoded(content))


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


def _dataset(name: str, path: str, *partition: Any, **options: Any) -> Callable[[Path], object]:
    """Return the reader of a dataset, of which the option `path` is a file in the folder, and all examples.

    Args:
        path: OPTION=NAME; without NAME, the folder itself.
        partition: Where the dataset has no clients, the name of a partition and its options.
        options: Further options of the dataset.
    """
    option, _, file = path.partition("=")

    def read(folder: Path) -> None:
        from rayfed.data.loading import load

        population = load(name, {**options, option: str(folder / file)}, *partition)
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


def _frame() -> "pd.DataFrame":
    import pandas as pd

    rows = np.arange(30)
    rng = np.random.default_rng(0)
    columns = {
        "a": rng.normal(size=30),
        "b": rng.integers(0, 9, 30),
        "label": [f"c{row % 3}" for row in rows],
        "client": rows % 3,
        "domain": [f"d{row % 3 % 2}" for row in rows],
        "split": np.where(rows % 5, "train", "test"),
    }
    return pd.DataFrame(columns)


def _make_csv(folder: Path) -> None:
    _frame().to_csv(folder / "x.csv", index=False)


def _make_parquet(folder: Path) -> None:
    _frame().to_parquet(folder / "x.parquet", index=False)


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


def _by_content(whole: bytes, rng: random.Random) -> bytes:
    """Return a changed file: a manifest, other JSON, a Parquet table, text, or any bytes."""
    if whole.startswith(b'{"checksum"'):
        return _manifest(whole, rng)
    if whole.startswith(b"{"):
        return mutations.mutated_json(whole, rng)
    if whole.startswith(b"PAR1"):
        return mutations.mutated_parquet(whole, rng)
    if b"\0" in whole:
        return mutations.mutated_bytes(whole, rng)
    return mutations.mutated_text(whole, rng)


@functools.cache
def _digits() -> "tuple[Dataset, list[ClientRows]]":
    from rayfed.data.loading import load_partitioned

    return load_partitioned("mini_digits", {"per_domain": 20, "domains": ["plain", "font"]})


def _make_partition(folder: Path) -> None:
    from rayfed.data.partitions.file import save

    save(*_digits(), folder / "x.parquet")


def _read_partition(folder: Path) -> None:
    from helpers.partitions import checked_clients
    from rayfed.data.partitions.file import File
    from rayfed.data.partitions.summary import describe

    dataset, _ = _digits()
    clients = checked_clients(dataset, File(file=str(folder / "x.parquet")))
    assert describe(dataset, clients).replace("\n", " ").isprintable(), "characters of control"


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
    from rayfed.experiments.device_profile import read_profile

    for file in ("x.csv", "x.parquet"):
        read_profile(str(folder / file), range(4))


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


def _make_yaml(folder: Path) -> None:
    (folder / "x.yaml").write_text(CONFIGURATION)


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


def _make_mnist(folder: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (40, 28, 28), dtype=np.uint8)
    write_mnist(folder, images, images[:20])


def _make_cifar(folder: Path) -> None:
    """Write the batches in the opcodes of Python 2, which wrote the published ones."""
    rng = np.random.default_rng(0)
    home = folder / "cifar-10-batches-py"
    home.mkdir()
    for name in (*Cifar10.train, *Cifar10.test):
        images = rng.integers(0, 256, (20, 3 * 32 * 32), dtype=np.uint8)
        labels = [k % 10 for k in range(20)]
        (home / name).write_bytes(pickle.dumps({"data": images, "labels": labels}, protocol=2))


def _make_news_and_signals(folder: Path) -> None:
    from helpers.text_and_sensors import write_har, write_news

    write_news(folder)
    write_har(folder, people=(1, 3), windows=6)


def _read_news(folder: Path) -> None:
    _dataset("ag_news", "root", "iid", {"clients": 1})(folder)
    _dataset("uci_har", "root")(folder)


def _make_weights(folder: Path) -> None:
    import rayfed

    rayfed.run({**RUN, "results": str(folder / "r")}, quiet=True).save(folder / "x")
    shutil.rmtree(folder / "r")


def _read_weights(folder: Path) -> None:
    from rayfed.experiments.config import Config
    from rayfed.experiments.plan import make_plan

    make_plan(Config.read(RUN, {"model.weights": str(folder / "x")}))


SOURCES: dict[str, Callable[[Path], None]] = {
    "results": _results,
    "owner": _owner,
    "npz": _make_npz,
    "mnist": _make_mnist,
    "cifar": _make_cifar,
    "usps": _make_usps,
    "mat": _make_mat,
    "tensors": _make_tensors,
    "yaml": _make_yaml,
    "profile": _make_profile,
    "partition": _make_partition,
    "csv": _make_csv,
    "parquet": _make_parquet,
    "encoded images": _make_encoded_images,
    "hub": _make_hub,
    "images": _make_images,
    "news and signals": _make_news_and_signals,
    "weights": _make_weights,
}
"""What writes valid files into an empty folder."""

_TWO = ("iid", {"clients": 2})
_ROWS = ("*/trials/.rows/*.json",)
_TABLES = ("*/metrics/*.parquet", "*/rounds/*.parquet", "*/partitions/*.parquet", "*/maps/*.parquet")
_MANIFESTS = ("*/checkpoints/*/*.json",)
_STATES = ("*/checkpoints/*/*.pt",)
_OF_TABLES = {"features": ["a", "b"], "label": "label", "client": "client", "domain": "domain", "split": "split"}

READERS: dict[str, Reader] = {
    "rows": Reader(source="results", read=_report("text"), files=_ROWS, mutation=mutations.mutated_json),
    "tables": Reader(source="results", read=_report("text"), files=_TABLES, mutation=mutations.mutated_parquet),
    "rows in LaTeX": Reader(
        source="results", read=_report("latex"), files=_ROWS, mutation=mutations.mutated_json, share=0.1
    ),
    "rows in Markdown": Reader(
        source="results", read=_report("markdown"), files=_ROWS, mutation=mutations.mutated_json, share=0.05
    ),
    "tables as CSV": Reader(
        source="results", read=_report("csv"), files=_TABLES, mutation=mutations.mutated_parquet, share=0.1
    ),
    "rows on a page": Reader(source="results", read=_page, files=_ROWS, mutation=mutations.mutated_json, share=0.02),
    "tables on a page": Reader(
        source="results", read=_page, files=_TABLES, mutation=mutations.mutated_parquet, share=0.02
    ),
    "rows of a trial": Reader(source="results", read=_saved_states, files=_ROWS, mutation=mutations.mutated_json),
    "owners": Reader(
        source="owner", read=_claims, files=("*/.owners/*.json",), mutation=mutations.mutated_json, writes=True
    ),
    "manifests": Reader(source="results", read=_saved_states, files=_MANIFESTS, mutation=_manifest),
    "states": Reader(
        source="results", read=_saved_states, files=_STATES, mutation=mutations.mutated_bytes, mend=_with_checksums
    ),
    "resumed": Reader(
        source="results",
        read=_resumed,
        files=("e/trials/.rows/*.json", "e/checkpoints/*/*", "e/metrics/*", "e/rounds/*"),
        mutation=_by_content,
        mend=_with_checksums,
        share=0.1,
        writes=True,
    ),
    "npz": Reader(source="npz", read=_dataset("npz", "file=x.npz"), files=("x.npz",), mutation=mutations.mutated_npz),
    "idx": Reader(
        source="mnist",
        read=_dataset("mnist", "root", *_TWO),
        files=("MNIST/raw/*",),
        mutation=mutations.mutated_idx,
    ),
    "cifar": Reader(
        source="cifar",
        read=_dataset("cifar10", "root", *_TWO),
        files=("cifar-10-batches-py/*",),
        mutation=mutations.mutated_pickle,
    ),
    "libsvm": Reader(source="usps", read=_read_usps, files=("*.bz2",), mutation=_libsvm),
    "mat": Reader(source="mat", read=_read_mat, files=("*.mat",), mutation=mutations.mutated_bytes),
    "tensors": Reader(source="tensors", read=_read_tensors, files=("x.pt",), mutation=mutations.mutated_bytes),
    "yaml": Reader(source="yaml", read=_read_space, files=("x.yaml",), mutation=mutations.mutated_yaml),
    "profiles": Reader(source="profile", read=_read_profile, files=("x.*",), mutation=_by_content),
    "partitions": Reader(
        source="partition", read=_read_partition, files=("x.parquet",), mutation=mutations.mutated_parquet
    ),
    "csv": Reader(
        source="csv",
        read=_dataset("csv", "file=x.csv", **_OF_TABLES),
        files=("x.csv",),
        mutation=mutations.mutated_text,
    ),
    "parquet": Reader(
        source="parquet",
        read=_dataset("parquet", "file=x.parquet", **_OF_TABLES),
        files=("x.parquet",),
        mutation=mutations.mutated_parquet,
    ),
    "encoded images": Reader(
        source="encoded images",
        read=_dataset("parquet", "file=x.parquet", *_TWO, features=["image"], label="label", size=8),
        files=("x.parquet",),
        mutation=mutations.mutated_parquet,
    ),
    "hub": Reader(
        source="hub",
        read=_dataset("huggingface", "folder=x", *_TWO, features=["a"], label="label"),
        files=("x/*.json", "x/*/*"),
        mutation=_by_content,
    ),
    "images": Reader(
        source="images",
        read=_dataset("imagefolder", "folder=x", *_TWO, size=8),
        files=("x/*/*",),
        mutation=mutations.mutated_bytes,
    ),
    "texts and signals": Reader(
        source="news and signals",
        read=_read_news,
        files=("*/*/*.txt", "AG_NEWS/data/*"),
        mutation=_by_content,
    ),
    "weights": Reader(
        source="weights", read=_read_weights, files=("x/*.safetensors",), mutation=mutations.mutated_bytes, share=0.25
    ),
}
"""Everything that reads files of somebody else, by name."""
