"""Where the tables of a dataset of the Hugging Face hub lie on disk, by split."""

import json
import re
from pathlib import Path
from typing import Any

from rayfed.core.errors import UsageError
from rayfed.data.readers.columns import TEST, TRAINING
from rayfed.data.readers.tables import ENDINGS

FORMS = (
    "expected what datasets.save_to_disk wrote, a copy of a dataset's repository with Parquet files, or its folder in "
    "the cache of huggingface_hub or datasets"
)
_SPLITS = {name: name for name in (*TEST, *TRAINING)}


def tables_by_split(folder: Path) -> dict[str, list[Path]]:
    """The Parquet or Arrow files of each split, in order.

    Raises:
        UsageError: no such folder, no tables in it, a part of a saved dataset that is missing, or several
            configurations side by side.
    """
    if not folder.is_dir():
        raise UsageError(f"data.folder={folder}: no such folder; {FORMS}")
    if (folder / "dataset_dict.json").is_file():
        splits = _json(folder / "dataset_dict.json").get("splits", [])
        return {split: _saved(folder / split) for split in splits}
    if (folder / "state.json").is_file():
        return {str(_json(folder / "state.json").get("_split") or "train"): _saved(folder)}
    found: dict[str, list[Path]] = {}
    for path in sorted(_snapshot(folder).rglob("*")):
        if path.suffix in ENDINGS and not path.name.startswith("cache-"):
            found.setdefault(_split_of(path), []).append(path)
    if not found:
        raise UsageError(f"data.folder={folder}: no .parquet or .arrow files; {FORMS}")
    for split, paths in found.items():
        homes = sorted({path.parent for path in paths})
        if len(homes) > 1:
            raise UsageError(
                f"data.folder={folder}: {split} files in {len(homes)} folders, {homes[0].name} and {homes[1].name} "
                "among them; set data.folder to one of them"
            )
    return found


def _snapshot(folder: Path) -> Path:
    """The newest files of a repository in the cache of huggingface_hub; another folder as it is."""
    snapshots = folder / "snapshots"
    if not snapshots.is_dir():
        return folder
    main = folder / "refs" / "main"
    revisions = sorted(path for path in snapshots.iterdir() if path.is_dir())
    wanted = snapshots / main.read_text().strip() if main.is_file() else None
    if wanted in revisions:
        return wanted
    if len(revisions) != 1:
        raise UsageError(f"{snapshots}: {len(revisions)} revisions; set data.folder to the folder of one of them")
    return revisions[0]


def _saved(folder: Path) -> list[Path]:
    """The files of one split that datasets.save_to_disk wrote."""
    state = _json(folder / "state.json")
    if state.get("_indices_data_files"):
        raise UsageError(
            f"{folder}: saved with a selection of rows beside it; save it again with a newer datasets, or with "
            "flatten_indices() before"
        )
    files = [folder / str(entry.get("filename")) for entry in state.get("_data_files") or [] if isinstance(entry, dict)]
    for path in files:
        if not path.is_file():
            raise UsageError(f"{path}: missing, though {folder / 'state.json'} lists it")
    if not files:
        raise UsageError(f"{folder / 'state.json'}: lists no data files; {FORMS}")
    return files


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: missing, cut short or damaged ({error}); {FORMS}") from error
    if not isinstance(found, dict):
        raise UsageError(f"{path}: holds {type(found).__name__}; {FORMS}")
    return found


def _split_of(path: Path) -> str:
    """The split that a file's name, or else its folder's, speaks of: mnist-train-00000-of-00001.parquet; else train."""
    for text in (path.stem, path.parent.name):
        for word in re.split(r"[^a-z]+", text.lower()):
            if word in _SPLITS:
                return word
    return "train"
