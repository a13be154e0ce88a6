"""Small datasets in their published forms, written for the tests that read them back."""

import bz2
import gzip
import io
import json
import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import scipy.io
import torch
from PIL import Image

from helpers.mnist_files import idx_bytes, write_mnist
from rayfed.data.sets.image_folders import DOMAINS, DomainNet10, OfficeCaltech10, Pacs

RANDOM = np.random.default_rng(11)


def picture(path: Path, side: int = 16, mode: str = "RGB") -> np.ndarray:
    """Writes a random image and gives back its pixels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = (side, side) if mode == "L" else (side, side, len(mode))
    made = RANDOM.integers(0, 256, shape, dtype=np.uint8)
    Image.fromarray(made, mode).save(path)
    return made


def tree(folder: Path, domains, classes, each: int = 5, ending: str = "png") -> None:
    """`<folder>/<domain>/<class>/0.png` and so on."""
    for domain in domains:
        for title in classes:
            for number in range(each):
                picture(folder / domain / title / f"{number}.{ending}")


def pacs(root: Path) -> None:
    tree(root / "PACS" / "kfold", Pacs.folders, Pacs.classes)


def office_home(root: Path) -> None:
    names = ("Art", "Clipart", "Product", "Real World")
    tree(root / "OfficeHomeDataset_10072016", names, [f"Thing_{number:02}" for number in range(65)], each=2)


def office_caltech10(root: Path) -> None:
    tree(root / "office_caltech_10", OfficeCaltech10.folders, OfficeCaltech10.classes, ending="jpg")


def domainnet10(root: Path) -> None:
    tree(root / "DomainNet", DOMAINS, (*DomainNet10.classes, "axe"))


def tiny_imagenet(root: Path) -> None:
    folder = root / "tiny-imagenet-200"
    wnids = [f"n{number:08}" for number in range(200, 0, -1)]
    for wnid in wnids:
        picture(folder / "train" / wnid / "images" / f"{wnid}_0.JPEG")
    picture(folder / "val" / "images" / "val_0.JPEG")
    picture(folder / "val" / "images" / "val_1.JPEG", mode="L")
    (folder / "wnids.txt").write_text("\n".join(wnids) + "\n")
    (folder / "val" / "val_annotations.txt").write_text(
        f"val_0.JPEG\t{wnids[3]}\t0\t32\t44\t62\nval_1.JPEG\t{wnids[9]}\t1\t2\t3\t4\n"
    )


def camelyon17(root: Path) -> None:
    lines = [",patient,node,x_coord,y_coord,tumor,slide,center,split"]
    for center in range(5):
        for number in range(6):
            patient = f"{20 * center:03}"
            name = f"patient_{patient}_node_{number % 2}"
            picture(root / f"camelyon17_v1.0/patches/{name}/patch_{name}_x_{32 * number}_y_64.png")
            tumor, split = number % 2, int(number > 3)
            lines.append(f"{len(lines)},{patient},{number % 2},{32 * number},64,{tumor},{center},{center},{split}")
    (root / "camelyon17_v1.0/metadata.csv").write_text("\n".join(lines) + "\n")


# How many experiments of each cell type the three parts have; FRAug makes four groups of all of them.
EXPERIMENTS = {"HEPG2": (3, 1, 1), "HUVEC": (6, 1, 2), "RPE": (3, 1, 0), "U2OS": (2, 1, 1)}


def rxrx1(root: Path) -> None:
    lines = ["site_id,well_id,cell_type,dataset,experiment,plate,well,site,well_type,sirna,sirna_id"]
    for cell, counts in EXPERIMENTS.items():
        parts = [part for part, count in zip(("train", "val", "test"), counts, strict=True) for _ in range(count)]
        for number, part in enumerate(parts, start=1):
            for well, sirna in (("B02", 3), ("B03", 1138)):
                for site in (1, 2):
                    name = f"{cell}-{number:02}"
                    picture(root / f"rxrx1_v1.0/images/{name}/Plate1/{well}_s{site}.png")
                    place = f"{name}_1_{well}"
                    lines.append(f"{place}_{site},{place},{cell},{part},{name},1,{well},{site},treatment,s1,{sirna}")
    (root / "rxrx1_v1.0/metadata.csv").write_text("\n".join(lines) + "\n")


def cifar_batch(count: int, key: str, classes: int, **changes) -> dict:
    data = RANDOM.integers(0, 256, (count, 3072), dtype=np.uint8)
    return {"data": data, key: [number % classes for number in range(count)], "batch_label": "one", **changes}


def cifar10(root: Path) -> None:
    for number in range(1, 6):
        pickled(root / f"cifar-10-batches-py/data_batch_{number}", cifar_batch(8, "labels", 10))
    pickled(root / "cifar-10-batches-py/test_batch", cifar_batch(6, "labels", 10))


def cifar100(root: Path) -> None:
    for file, count in (("train", 120), ("test", 110)):
        pickled(root / "cifar-100-python" / file, cifar_batch(count, "fine_labels", 100, coarse_labels=[0] * count))


def pickled(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(value, protocol=2))


DIGITS = {"mnist": (40, 20), "svhn": (50, 25), "usps": (20, 10), "synthdigits": (60, 10), "mnist_m": (30, 20)}


def digits(count: int, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    return RANDOM.integers(0, 256, (count, *shape), dtype=np.uint8), np.arange(count) % 10


def mnist(root: Path) -> None:
    write_mnist(root, *(digits(count, 28, 28)[0] for count in DIGITS["mnist"]))


def mat(path: Path, images: np.ndarray, labels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    scipy.io.savemat(path, {"X": np.moveaxis(images, 0, -1), "y": labels[:, None].astype(np.uint8)})


def svhn(root: Path) -> None:
    for side, count in zip(("train", "test"), DIGITS["svhn"], strict=True):
        images, labels = digits(count, 32, 32, 3)
        mat(root / f"SVHN/{side}_32x32.mat", images, np.where(labels == 0, 10, labels))


def synthdigits(root: Path) -> None:
    for side, count in zip(("train", "test"), DIGITS["synthdigits"], strict=True):
        mat(root / f"SynthDigits/synth_{side}_32x32.mat", *digits(count, 32, 32, 3))


def usps_line(label: int, values: np.ndarray) -> str:
    return f"{label + 1} " + " ".join(f"{place}:{value:.4f}" for place, value in enumerate(values, start=1)) + " \n"


def usps(root: Path) -> None:
    (root / "USPS").mkdir(parents=True)
    for file, count in zip(("usps.bz2", "usps.t.bz2"), DIGITS["usps"], strict=True):
        images, labels = digits(count, 256)
        lines = "".join(map(usps_line, labels, images / 127.5 - 1))
        (root / "USPS" / file).write_bytes(bz2.compress(lines.encode()))


def mnist_m(root: Path) -> None:
    (root / "MNIST_M").mkdir(parents=True)
    for side, count in zip(("train", "test"), DIGITS["mnist_m"], strict=True):
        images, labels = digits(count, 28, 28, 3)
        torch.save((torch.from_numpy(images), torch.from_numpy(labels)), root / f"MNIST_M/mnist_m_{side}.pt")


def digits5(root: Path) -> None:
    for write in (mnist, svhn, usps, synthdigits, mnist_m):
        write(root)


def emnist(root: Path, split: str = "balanced", first: int = 0, classes: int = 47) -> None:
    (root / "EMNIST" / "gzip").mkdir(parents=True)
    for side, count in (("train", 100), ("test", 50)):
        labels = np.arange(count) % classes + first
        for kind, array in (("images-idx3", digits(count, 28, 28)[0]), ("labels-idx1", labels)):
            file = root / "EMNIST" / "gzip" / f"emnist-{split}-{side}-{kind}-ubyte.gz"
            file.write_bytes(gzip.compress(idx_bytes(array), mtime=0))


def hub_table(path: Path, columns: dict, classes: dict[str, list[str]]) -> None:
    """A Parquet file as the hub has them, whose metadata name the classes of columns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    features = {name: {"_type": "Value"} for name in columns}
    features |= {name: {"_type": "ClassLabel", "names": names} for name, names in classes.items()}
    metadata = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    pq.write_table(pa.table(columns).replace_schema_metadata(metadata), path)


def png(*shape: int) -> dict[str, object]:
    stream = io.BytesIO()
    Image.fromarray(RANDOM.integers(0, 256, shape, dtype=np.uint8)).save(stream, "PNG")
    return {"bytes": stream.getvalue(), "path": "image.png"}


def femnist(root: Path) -> None:
    rows = range(90)
    columns = {
        "image": [png(28, 28) for _ in rows],
        "writer_id": [f"f{row % 3:04}_09" for row in rows],
        "character": [row % 62 for row in rows],
    }
    names = [*"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"]
    hub_table(root / "FEMNIST/default/train/0000.parquet", columns, {"character": names})


def imagefolder(root: Path) -> None:
    tree(root / "own", ("day", "night"), ("cat", "dog", "eel"))


WRITERS = {
    "digits5": digits5,
    "pacs": pacs,
    "office_home": office_home,
    "office_caltech10": office_caltech10,
    "domainnet10": domainnet10,
    "tiny_imagenet": tiny_imagenet,
    "camelyon17": camelyon17,
    "rxrx1": rxrx1,
    "cifar10": cifar10,
    "rotated_cifar10": cifar10,
    "rotated_cifar100": cifar100,
    "cifar100": cifar100,
    "imagefolder": imagefolder,
}


def options(name: str, root: Path, **others) -> dict:
    """The options that say where a written dataset lies. The 520 images of office_home stay as small as they are."""
    others = {"size": 16} | others if name == "office_home" else others
    return {"folder": str(root / "own"), **others} if name == "imagefolder" else {"root": str(root), **others}
