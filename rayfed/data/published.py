"""Published datasets: where their files come from, as `published.yaml` says, and their download."""

import functools
import hashlib
import json
import os
import platform
import shutil
import socket
import stat
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path

import yaml

from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.data.on_disk import CacheUnusable, cache_folder, locked
from rayfed.data.readers.files import ROOT_HELP, datasets_folder, note

TIMEOUT = 60.0  # seconds without a byte after which a server counts as gone


@dataclass(frozen=True, kw_only=True)
class Source:
    """One entry of `published.yaml`, which describes the fields."""

    name: str
    datasets: Sequence[str]
    page: str
    licence: str
    megabytes: float | None
    folders: Sequence[str]
    expected: str
    base: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    addresses: Mapping[str, str] = field(default_factory=dict)
    archives: Mapping[str, str] = field(default_factory=dict)
    inner: str = ""
    verify: Mapping[str, str] = field(default_factory=dict)
    known: Mapping[str, str] = field(default_factory=dict)
    hub: Mapping[str, str | int] = field(default_factory=dict)
    by_hand: str = ""
    options: str = ""

    @property
    def size(self) -> str:
        """The size of the download in words."""
        if self.megabytes is None:
            return "unknown size"
        if self.megabytes >= 1e3:
            return f"{self.megabytes / 1e3:.3g} GB"
        return f"{self.megabytes:g} MB"

    @property
    def address(self) -> str:
        """The address from which data.download=true gets the files, "" if there is none."""
        if self.hub:
            return f"https://huggingface.co/datasets/{self.hub['repo']}, revision {self.hub['revision']}"
        return self.base or next(iter(self.archives), "")

    def home(self, root: str | None) -> Path:
        """Return the folder below `root` that a download fills."""
        return datasets_folder(root) / Path(self.folders[0]).parts[0]

    def present(self, root: str | None) -> Path | None:
        """Return the dataset's folder below `root`, if there is one."""
        folder = datasets_folder(root)
        for name in self.folders:
            if (folder / name).is_dir():
                return folder / name
        return None

    def missing(self, folder: Path) -> list[str]:
        """Return the files that a download to `folder` would add, and "" for what comes in archives or from the hub."""
        if self.archives or self.hub:
            if folder.exists():
                return []
            return ["", *self.files]
        plain = {file: file.removesuffix(".gz") for file in self.files}  # the readers take unpacked files, too
        return [file for file in self.files if not any_is_file(folder / file, folder / plain[file])]

    def compare(self, folder: Path, files: Iterable[str]) -> None:
        """Note which of `files` in `folder` are not as published, as far as their checksums are known."""
        checks = {**self.files, **self.verify, **self.known}
        for file in files:
            try:
                _check(folder / file, checks.get(file, ""))
            except _Failed as failed:
                note(f"{folder}: {failed}")


@functools.cache
def sources() -> dict[str, Source]:
    """Return the sources by name."""
    file = Path(__file__).with_name("published.yaml")
    table = yaml.safe_load(file.read_text(encoding="utf-8"))
    return {name: Source(name=name, **entry) for name, entry in table.items()}


def any_is_file(*paths: Path) -> bool:
    """Return whether one of `paths` is a file."""
    return any(path.is_file() for path in paths)


@dataclass(frozen=True, kw_only=True)
class Published:
    """Base class of datasets whose files are published: where their folders are, and whether they are downloaded.

    Their `load` raises UsageError if a file is missing, damaged or of another kind, or if options contradict others.
    """

    root: str | None = option(None, help=ROOT_HELP)
    download: bool = option(False, help="download missing files; `rayfed data` lists sources, sizes and licences")

    def find(self, name: str, files: Sequence[str] = ()) -> Path:
        """Return the folder of the source `name`, which has `files`, plain or as .gz.

        If `download` is set, what is missing is downloaded first.
        """
        source = sources()[name]
        folder = source.present(self.root) or source.home(self.root)
        is_here = folder.is_dir()
        if self.download and (source.missing(folder) or not is_here):
            obtain(source, folder)
            is_here = True
        absent = []
        for file in files:
            if not any_is_file(folder / file, folder / f"{file}.gz"):
                absent.append(file)
        if is_here and not absent:
            return folder
        others = ""
        if len(source.folders) > 1 and not is_here:
            others = f" (or {', '.join(source.folders[1:])})"
        problem = "no such folder"
        if is_here:
            problem = f"no {', '.join(absent)}"
        remedy = source.by_hand or f"data.download=true downloads it ({source.size})"
        ways = f"from {source.page}; {remedy}; data.root is the folder that contains it"
        raise UsageError(f"{folder}{others}: {problem}; expected {source.expected}; {ways}")


class _Failed(Exception):
    """Raised when a download cannot go on."""


def obtain(source: Source, folder: Path) -> None:
    """Download what `folder` lacks of a source, check it and put it there.

    The files are assembled in a temporary folder beside `folder`. They appear there when all are complete, and no file
    is left if the download fails, with UsageError. If several processes need a source, one downloads and others wait.
    """
    where = f"data.download=true: {source.name}"
    if source.by_hand:
        way = f"put the files into {folder}, see {source.page}"
        raise UsageError(f"{where}: {source.by_hand}; {way}")
    machine = platform.node()  # the lock is this machine's
    staging = folder.with_name(f".{source.name}.{machine}.part")
    path_hash = hashlib.sha256(str(folder).encode()).hexdigest()
    lock = path_hash[:16]
    try:
        with locked(cache_folder() / f"download-{lock}.lock"):
            missing = source.missing(folder)
            if not missing:
                return
            try:
                shutil.rmtree(staging, ignore_errors=True)  # left by a process that was killed
                staging.mkdir(parents=True)
                assembled = _assembled(source, staging, missing)
                if folder.exists():
                    shutil.copytree(assembled, folder, dirs_exist_ok=True, copy_function=shutil.move)
                else:
                    assembled.rename(folder)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
    except (_Failed, CacheUnusable, OSError) as error:
        reason = " ".join(str(error).split())[:500]
        ways = f"give the same command again later, or put {source.expected} into {folder} (from {source.page})"
        raise UsageError(f"{where}: {reason}; nothing was kept; {ways}") from error


def _assembled(source: Source, staging: Path, missing: Sequence[str]) -> Path:
    """Fill `staging` and return the folder in it that is the dataset's."""
    if source.hub:
        _from_hub(source, staging)
    for end, check in source.archives.items():
        archive = staging / ".archive"
        _fetch(source.base + end, archive, check)
        _unpack(archive, staging)
    if source.inner:
        _unpack(staging / source.inner, staging)
    result = staging
    for name in reversed(source.folders):
        if (staging / name).is_dir():
            result = staging / name
    for file in filter(None, missing):
        address = source.base + source.addresses.get(file, Path(file).name)
        _fetch(address, result / file, source.files[file])
    for file, check in source.verify.items():
        _check(result / file, check)
    return result


def _fetch(address: str, path: Path, check: str) -> None:
    """Download a file and check it."""
    from torch.hub import download_url_to_file

    path.parent.mkdir(parents=True, exist_ok=True)
    patience = socket.getdefaulttimeout()
    try:
        socket.setdefaulttimeout(TIMEOUT)  # torch.hub passes none
        download_url_to_file(address, str(path), progress=sys.stderr.isatty())
        _check(path, check)
    except (_Failed, OSError, HTTPException) as error:
        reason = str(error).strip("<>")
        raise _Failed(f"{address}: {reason}") from error
    finally:
        socket.setdefaulttimeout(patience)


def _check(path: Path, check: str) -> None:
    """Raise if a file differs from its `check`: "md5:…", "sha256:…", "lines:…", or "" for none."""
    kind, _, expected = check.partition(":")
    if not kind:
        return
    with open(path, "rb") as file:
        if kind == "lines":
            actual = str(sum(1 for _ in file))
        else:
            actual = hashlib.file_digest(file, kind).hexdigest()
    if actual != expected:
        found = f"{path.name} has {kind} {actual}"
        raise _Failed(f"{found}, but the published file has {expected}")


def _unpack(archive: Path, folder: Path) -> None:
    """Unpack a .zip or .tar archive, compressed or not, into `folder`, and delete it."""
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as packed:
                for entry in packed.infolist():
                    _inside(folder, entry.filename, not stat.S_ISLNK(entry.external_attr >> 16))
                packed.extractall(folder)
        else:
            with tarfile.open(archive) as tar:
                tar.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.3 and older lack it
                for member in tar:
                    _inside(folder, member.name, member.isreg() or member.isdir())
                    tar.extract(member, folder)
    except _Failed:
        raise
    except Exception as error:  # a damaged archive raises whatever its decompressor likes
        reason = f"{type(error).__name__}: {error}"
        raise _Failed(f"the archive cannot be unpacked ({reason})") from error
    archive.unlink()


def _inside(folder: Path, name: str, plain: bool = True) -> Path:
    """Return the path of the archive's member `name` in `folder`; raise if it is not `plain` or lies elsewhere."""
    path = folder / name
    target = Path(os.path.normpath(path))
    if not plain or not target.is_relative_to(folder):
        raise _Failed(f"the archive is not to be trusted: it would write {name!r} outside of the dataset's folder")
    return path


def _folder_name(name: str) -> str:
    """Return the last part of a name in a table as the name of a folder; raise if it is none."""
    last = Path(name).name
    if last in ("", ".."):
        raise _Failed(f"its tables are not to be trusted: they name a folder {name!r}")
    return last


def _from_hub(source: Source, folder: Path) -> None:
    """Download the tables of a source on the Hugging Face hub; write their images to <domain>/<class>/ if it has them.

    `huggingface_hub` compares sizes; the revision identifies the contents, and the number of rows is checked.
    """
    try:
        from huggingface_hub import snapshot_download, utils
    except ImportError as error:
        raise _Failed("the Hugging Face hub needs a package: pip install 'rayfed-sim[hub]'") from error
    import pyarrow.parquet

    hub = source.hub
    has_images = "domain" in source.hub
    if has_images:
        place = folder / ".hub"
    else:
        place = folder
    utils.logging.set_verbosity_error()  # it would report each of five attempts
    try:
        snapshot_download(
            str(hub["repo"]),
            repo_type="dataset",
            revision=str(hub["revision"]),
            allow_patterns=[str(hub["files"])],
            local_dir=place,
            endpoint=os.environ.get("HF_ENDPOINT"),  # a mirror
        )
        tables = sorted(place.rglob("*.parquet"))
        rows = sum(pyarrow.parquet.read_metadata(table).num_rows for table in tables)
        if rows != hub["rows"]:
            published = f"{hub['rows']:,} were published"
            raise _Failed(f"it has {rows:,} rows, but {published}")
        if has_images:
            domain = str(hub["domain"])
            _write_images(tables, folder, domain, str(hub["label"]))
    except Exception as error:  # of several libraries
        reason = str(error)
        if not isinstance(error, _Failed):
            reason = f"{type(error).__name__}: {reason}"
        raise _Failed(f"{source.address}: {reason}") from error
    rest = place / ".cache"
    if has_images:
        rest = place
    shutil.rmtree(rest, ignore_errors=True)


def _write_images(tables: Sequence[Path], folder: Path, domain: str, label: str) -> None:
    """Write the images of hub tables to <domain>/<class>/<row>.jpg, with the names that the tables declare."""
    from pyarrow.parquet import ParquetFile

    number = 0
    for table in tables:
        file = ParquetFile(table)
        declared = json.loads(file.schema_arrow.metadata[b"huggingface"])["info"]["features"]
        names = {}
        for column in (domain, label):
            names[column] = declared[column].get("names")
        for batch in file.iter_batches(256, columns=["image", domain, label]):
            for row in batch.to_pylist():
                parts = []
                for key in (domain, label):
                    if names[key]:
                        parts.append(names[key][row[key]])
                    else:
                        parts.append(str(row[key]))
                names_of_folders = map(_folder_name, parts)
                path = folder.joinpath(*names_of_folders, f"{number:06}.jpg")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(row["image"]["bytes"])
                number += 1
