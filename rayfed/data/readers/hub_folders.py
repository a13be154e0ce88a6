"""The tables of a Hugging Face dataset in a local folder, by split."""

import json
import re
from pathlib import Path
from typing import Any

from rayfed.core.errors import UsageError
from rayfed.data.readers.columns import TEST, TRAINING
from rayfed.data.readers.files import files_below, readable
from rayfed.data.readers.tables import ENDINGS

FORMATS = (
    "expected a folder written by datasets.save_to_disk, a copy of a dataset's repository with Parquet files, or its "
    "folder in the cache of huggingface_hub or datasets"
)
_SPLITS = {name: name for name in (*TEST, *TRAINING)}


def tables_by_split(folder: Path) -> dict[str, list[Path]]:
    """Return the Parquet or Arrow files of each split, in order.

    Raises:
        UsageError: The folder does not exist or has no tables, a part of a saved dataset is missing, or there are
            several configurations side by side.
    """
    if not folder.is_dir():
        raise UsageError(f"data.folder={folder}: no such folder; {FORMATS}")
    if (folder / "dataset_dict.json").is_file():
        splits = _json(folder / "dataset_dict.json").get("splits", [])
        return {split: _saved(folder / split) for split in splits}
    if (folder / "state.json").is_file():
        return {str(_json(folder / "state.json").get("_split") or "train"): _saved(folder)}
    by_split: dict[str, list[Path]] = {}
    for path in files_below(_snapshot(folder)):
        if path.suffix in ENDINGS and not path.name.startswith("cache-"):
            by_split.setdefault(_split_of(path), []).append(path)
    if not by_split:
        raise UsageError(f"data.folder={folder}: no .parquet or .arrow files; {FORMATS}")
    for split, paths in by_split.items():
        parents = sorted({path.parent for path in paths})
        if len(parents) > 1:
            raise UsageError(
                f"data.folder={folder}: {split} files in {len(parents)} folders, including {parents[0].name} and "
                f"{parents[1].name}; set data.folder to one of them"
            )
    return by_split


def _snapshot(folder: Path) -> Path:
    """Return the folder of the current revision in a huggingface_hub cache; return any other folder unchanged."""
    snapshots = folder / "snapshots"
    if not snapshots.is_dir():
        return folder
    main = folder / "refs" / "main"
    revisions = sorted(path for path in snapshots.iterdir() if path.is_dir())
    current = snapshots / main.read_text().strip() if main.is_file() else None
    if current in revisions:
        return current
    if len(revisions) != 1:
        raise UsageError(f"{snapshots}: {len(revisions)} revisions; set data.folder to the folder of one of them")
    return revisions[0]


def _saved(folder: Path) -> list[Path]:
    """Return the files of one split that datasets.save_to_disk wrote."""
    state = _json(folder / "state.json")
    if state.get("_indices_data_files"):
        raise UsageError(
            f"{folder}: saved with a separate selection of rows; save it again with a newer version of datasets, or "
            "after flatten_indices()"
        )
    with readable(folder / "state.json", "a list of data files"):
        files = [folder / entry["filename"] for entry in state["_data_files"]]
    for path in files:
        if not path.is_file():
            raise UsageError(f"{path}: missing, though {folder / 'state.json'} lists it")
    return files


def _json(path: Path) -> dict[str, Any]:
    with readable(path, "a JSON object"):
        return dict(json.loads(path.read_text(encoding="utf-8")))


def _split_of(path: Path) -> str:
    """Return the split in the name of a file (mnist-train-00000-of-00001.parquet), else of its folder, else train."""
    for text in (path.stem, path.parent.name):
        for word in re.split(r"[^a-z]+", text.lower()):
            if word in _SPLITS:
                return word
    return "train"
