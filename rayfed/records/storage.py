"""Where results are kept: a folder on a disk or in an object store, by pyarrow's filesystems."""

import contextlib
import datetime
import functools
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rayfed.core.errors import StorageError, UsageError, one_line, without_secrets
from rayfed.core.paths import expanded, lasting, read_file

SCHEMES = ("file", "s3", "gs")
"""Schemes of the URLs that `open_storage` takes, besides `memory` for tests: fsspec's filesystem in one process."""
_UNFINISHED = ".unfinished"
_BUCKET = re.compile(r"[\w.-]+", re.ASCII)
_CONNECT_SECONDS = 10
_REQUEST_SECONDS = 60
_RETRY_SECONDS = 60
_LONGEST_MESSAGE = 250  # characters of an object store's error; Google's client gives a paragraph


class Storage:
    """One folder of results. Methods take the names of files directly in it.

    They raise `OSError` (`FileNotFoundError` where a file is missing) if the disk or the object store fails.

    Args:
        filesystem: One of pyarrow's.
        path: The folder in it.
        location: The path or URL, for messages.

    Attributes:
        local: The folder, if it is on a disk; else None.
    """

    def __init__(self, filesystem: Any, path: str, location: str):
        self.filesystem = filesystem
        self.path = path
        self.location = location
        self.local: Path | None = None
        if filesystem.type_name == "local":
            self.local = Path(path)

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.path.rpartition("/")[2]

    def child(self, *names: str) -> "Storage":
        """Return a folder below this one, which need not exist."""
        path = "/".join([self.path, *names])
        return Storage(self.filesystem, path, "/".join([self.location, *names]))

    def read(self, name: str) -> bytes:
        """Return the content of a file."""
        if self.local is not None:
            return read_file(self.local / name)
        path = f"{self.path}/{name}"
        filesystem = self.filesystem
        if filesystem.type_name == "gcs":
            # one request; `open_input_file` takes two here, to open the object and to read it
            with _os_errors(), filesystem.open_input_stream(path, compression=None) as stream:
                return bytes(stream.read())
        with _os_errors(), filesystem.open_input_file(path) as file:
            size = file.size()
            # one request, which reads one version of the object
            if size:
                return bytes(file.read_at(size, 0))
            return b""

    def write(self, name: str, content: bytes | memoryview) -> None:
        """Write a file, which at every moment has either its old content or the new content.

        On a disk, the new content is in a hidden file of the same folder until it is whole; a crash may leave that.
        """
        if self.local is None:
            # Without compression=None, pyarrow would compress a file whose name ends in .gz again.
            path = f"{self.path}/{name}"
            with _os_errors(), self.filesystem.open_output_stream(path, compression=None) as out:
                out.write(content)
            return
        self.local.mkdir(parents=True, exist_ok=True)
        unfinished = self.local / f".{name}{_UNFINISHED}"
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW  # a link could lead out of the folder
            with open(os.open(unfinished, flags, 0o666), "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())  # otherwise a loss of power may leave the new name with no content
            os.replace(unfinished, self.local / name)
        except BaseException:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
            raise

    def files(self) -> dict[str, int]:
        """Return the sizes of the files in this folder by name; nothing if the folder does not exist."""
        return {info.base_name: info.size for info in self._infos() if info.is_file}

    def folders(self) -> list[str]:
        """Return the names of the folders in this folder, sorted."""
        if self.local is not None:
            return sorted(info.base_name for info in self._infos() if not info.is_file)
        # A folder of an object store may have no object of its own; the names of the objects below it tell.
        names = []
        for info in self._infos(recursive=True):
            path = info.path.lstrip("/")
            inner = path[len(self.path) + 1 :]
            names.append(inner.partition("/"))
        return sorted({name for name, below, _ in names if below})

    def exists(self) -> bool:
        """Return whether this folder exists; in an object store, whether anything is in it."""
        if self.local is not None:
            return self.local.is_dir()
        return bool(self._infos(recursive=True))

    def delete(self, name: str) -> None:
        """Delete a file if it is there."""
        with contextlib.suppress(FileNotFoundError), _os_errors():
            self.filesystem.delete_file(f"{self.path}/{name}")

    def delete_all(self) -> None:
        """Delete this folder if it is there."""
        with contextlib.suppress(FileNotFoundError), _os_errors():
            if self.exists():
                self.filesystem.delete_dir(self.path)

    def sync(self) -> None:
        """Make the names of finished files survive a loss of power, as objects in a store do."""
        if self.local is not None and os.name == "posix":  # Windows cannot open folders
            descriptor = os.open(self.local, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def _infos(self, *, recursive: bool = False) -> list[Any]:
        """Return pyarrow's information on the files and folders in this folder, with `recursive` also below it."""
        from pyarrow.fs import FileSelector

        with _os_errors():
            selected = FileSelector(self.path, allow_not_found=True, recursive=recursive)
            infos = self.filesystem.get_file_info(selected)
        return [info for info in infos if info.base_name]


def is_url(location: str | Path) -> bool:
    """Return whether `location` is a URL and not a path."""
    return "://" in str(location)


def open_storage(location: str | Path) -> Storage:
    """Return the folder at a path or URL, without making it or asking whether it exists.

    Args:
        location: A path (see `lasting`), or a URL such as s3://bucket/results, gs://bucket/results or file:///results.
            Credentials, regions and endpoints come from the environment, as the tools of the providers read it.

    Raises:
        UsageError: As `check_location` does, or pyarrow was built without the filesystem of the URL.
    """
    check_location(location)
    scheme, address = _split(location)
    if scheme == "file":
        path = lasting(address)
        return Storage(_filesystem("file"), Path(path).as_posix(), path)
    bucket = address.partition("/")[0]
    try:
        with _os_errors():
            filesystem = _filesystem(scheme, bucket)
    except (OSError, ImportError, ValueError) as error:
        raise UsageError(f"results={location}: cannot be reached ({one_line(error)})") from error
    return Storage(filesystem, address, f"{scheme}://{address}")


def finished_name(name: str) -> str:
    """Return the name that a file gets when it is whole."""
    if name.endswith(_UNFINISHED):
        return name[1:].removesuffix(_UNFINISHED)
    return name


def check_location(location: str | Path) -> None:
    """Raise UsageError if results cannot lie at a path or URL, which is not opened. Messages hide what may be secret.

    Raises:
        UsageError: The URL is malformed or has an unknown scheme, or no file can have the name of the path.
    """
    scheme, address = _split(location)
    hidden = without_secrets(str(location))
    if scheme not in (*SCHEMES, "memory"):
        expected = ", ".join(f"{name}://" for name in SCHEMES)
        raise UsageError(f"results={hidden}: unknown scheme; expected a path or a URL that begins with {expected}")
    if scheme == "file":
        if is_url(location) and not address.startswith("/"):
            raise UsageError(
                f"results={hidden}: expected file:///FOLDER with the whole path, or a path without file://"
            )
        expanded(address)
    elif not _BUCKET.fullmatch(address.partition("/")[0]) or "?" in address:
        variables = "AWS_REGION and AWS_ENDPOINT_URL"
        if scheme == "gs":
            variables = "GOOGLE_APPLICATION_CREDENTIALS"
        raise UsageError(
            f"results={scheme}://…: options after ? and users before @ are not read; use {scheme}://BUCKET/FOLDER, and "
            f"environment variables such as {variables} for all else"
        )


def _split(location: str | Path) -> tuple[str, str]:
    """Return the scheme of a path or URL in lower case, as schemes are compared, and the rest."""
    if not is_url(location):
        return "file", str(location)
    scheme, _, address = str(location).partition("://")
    scheme = scheme.lower()
    if scheme != "file":
        address = address.strip("/")
    return scheme, address


def join(results: str, *names: str) -> str:
    """Return the path or URL of a file or folder of results."""
    return "/".join([results.rstrip("/"), *names])


def make_experiment_folder(results: str, experiment: str) -> None:
    """Make the folder of an experiment in `results`, a path or URL, and check that files can be written to it.

    The check writes a file, because permissions do not suffice: root has all of them and cannot write to /proc.

    Raises:
        UsageError: The folder cannot be made or written to, or the object store cannot be reached.
    """
    home = open_storage(results).child(experiment)
    name = f".writable-{uuid.uuid4().hex}"
    try:
        home.write(name, b"")
        home.delete(name)
    except OSError as error:
        words = f"{home.location} cannot be written ({error.strerror or one_line(error)})"
        raise UsageError(f"results={results}: {words}; give a folder that you may write to") from error


@functools.cache
def _filesystem(scheme: str, bucket: str = "") -> Any:
    """Return pyarrow's filesystem."""
    from pyarrow import fs

    if scheme == "file":
        return fs.LocalFileSystem()
    if scheme == "memory":
        import fsspec

        return fs.PyFileSystem(fs.FSSpecHandler(fsspec.filesystem("memory")))
    if scheme == "gs":
        patience = datetime.timedelta(seconds=_RETRY_SECONDS)  # pyarrow's own is 15 minutes
        emulator = os.environ.get("STORAGE_EMULATOR_HOST")
        if emulator:  # as Google's own clients read it
            protocol, _, host = emulator.rstrip("/").rpartition("://")
            at_host = {"scheme": protocol or "http", "endpoint_override": host}
            return fs.GcsFileSystem(anonymous=True, retry_time_limit=patience, **at_host)
        return fs.GcsFileSystem(retry_time_limit=patience)
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if region is None and endpoint is None:
        region = fs.resolve_s3_region(bucket)
    return fs.S3FileSystem(
        region=region,
        endpoint_override=endpoint,
        connect_timeout=_CONNECT_SECONDS,
        request_timeout=_REQUEST_SECONDS,
        allow_delayed_open=True,  # one request for a small object, and not three
    )


@contextlib.contextmanager
def _os_errors() -> Iterator[None]:
    """Raise an OSError with a short message in place of any exception of pyarrow."""
    import pyarrow as pa

    try:
        yield
    except (OSError, pa.ArrowException) as error:
        text = one_line(error)
        if isinstance(error, OSError) and len(text) <= _LONGEST_MESSAGE:
            raise
        kind: type[OSError] = OSError
        if isinstance(error, FileNotFoundError):
            kind = FileNotFoundError
        raise kind(text.partition(" error_info=")[0][:_LONGEST_MESSAGE]) from error  # without Google's list of retries


@contextlib.contextmanager
def storage_errors(location: str) -> Iterator[None]:
    """Raise `StorageError`, with one line that names `location`, in place of an OSError."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"results in {location}: {error.strerror or one_line(error)}") from error
