"""Where results are kept: a folder on a disk or a prefix in an object store, behind one interface."""

import contextlib
import datetime
import errno
import functools
import os
import re
import shutil
import socket
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from rayfed.core.errors import StorageError, UsageError

SCHEMES = ("file", "s3", "gs")
"""Of URLs that `open_storage` takes. `memory`, fsspec's filesystem within one process, is there for tests."""
_ROOM = ".room"
# What the store said, in the paragraph that Google's client makes of it.
_GOOGLES_WORDS = re.compile(r"gcloud-cpp\.retry\.original-message=(?:PerformWork\(\) - )?(.*?)\}\}\)")
_CONNECT_SECONDS, _REQUEST_SECONDS, _RETRY_SECONDS = 10, 60, 60


class Staged(ABC):
    """A file that is being written aside. It appears under its name, whole, with `finish`."""

    file: IO[bytes]

    def write(self, content: bytes | memoryview) -> None:
        self.file.write(content)

    @abstractmethod
    def finish(self) -> None:
        """Give the file its name; it then survives a loss of power if the storage does."""

    @abstractmethod
    def discard(self) -> None:
        """Remove what was written."""


class Storage(ABC):
    """One folder of results. Names are those of files directly in it.

    All methods raise `OSError` (`FileNotFoundError` where a file is missing) if the disk or the store fails.

    Attributes:
        location: The path or URL, for messages.
    """

    location: str

    @abstractmethod
    def child(self, *names: str) -> "Storage":
        """Return a folder below this one, which need not exist."""

    @abstractmethod
    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """Return `length` bytes from `offset`, or to the end; fewer if the file is shorter."""

    @abstractmethod
    def stage(self, name: str) -> Staged:
        """Begin to write a file aside."""

    @abstractmethod
    def files(self) -> dict[str, int]:
        """Return the sizes of the files in this folder by name; nothing if the folder does not exist."""

    @abstractmethod
    def folders(self) -> list[str]:
        """Return the names of the folders in this folder, sorted."""

    @abstractmethod
    def exists(self) -> bool:
        """Return whether this folder exists; in an object store, whether anything is in it."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete a file if it is there."""

    @abstractmethod
    def delete_all(self) -> None:
        """Delete this folder if it is there."""

    @abstractmethod
    def sync(self) -> None:
        """Make the names of finished files survive a loss of power."""

    def write(self, name: str, content: bytes | memoryview) -> None:
        """Write a file, which at every moment has either its old content or the new one, and never a part."""
        staged = self.stage(name)
        try:
            staged.write(content)
            staged.finish()
        except BaseException:
            staged.discard()
            raise


class LocalStorage(Storage):
    """A folder on a disk. Unfinished files are hidden, and a crash may leave one."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.location = str(path)

    def child(self, *names: str) -> Storage:
        return LocalStorage(self.path.joinpath(*names))

    def keep_room(self, least: int, size: int) -> None:
        """Take `size` bytes of the disk for `write_in_room` if it has fewer than `least`, as far as there is space."""
        room = self.path / _ROOM
        with contextlib.suppress(OSError):
            if not room.exists() or room.stat().st_size < least:
                self.write(_ROOM, bytes(size))

    def write_in_room(self, name: str, content: bytes | memoryview) -> None:
        """Write a file on a full disk, into the bytes that `keep_room` took, which nothing else can take meanwhile."""
        room = self.path / _ROOM
        with open(room, "r+b") as file:
            if os.fstat(file.fileno()).st_size < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            file.write(content)
            file.truncate()
            os.fsync(file.fileno())
        os.replace(room, self.path / name)

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        with open(self.path / name, "rb") as file:
            file.seek(offset)
            return file.read(-1 if length is None else length)

    def stage(self, name: str) -> Staged:
        return _LocalStaged(self.path, name)

    def files(self) -> dict[str, int]:
        if not self.path.is_dir():
            return {}
        sizes = {}
        for entry in os.scandir(self.path):
            with contextlib.suppress(FileNotFoundError):  # another process has just renamed it
                if entry.is_file():
                    sizes[entry.name] = entry.stat().st_size
        return sizes

    def folders(self) -> list[str]:
        return sorted(entry.name for entry in os.scandir(self.path) if entry.is_dir()) if self.path.is_dir() else []

    def exists(self) -> bool:
        return self.path.is_dir()

    def delete(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    def delete_all(self) -> None:
        if self.path.is_dir():
            shutil.rmtree(self.path)

    def sync(self) -> None:
        if os.name == "posix":  # Windows cannot open folders
            descriptor = os.open(self.path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


class _LocalStaged(Staged):
    def __init__(self, folder: Path, name: str):
        folder.mkdir(parents=True, exist_ok=True)
        self._path, self._unfinished = folder / name, folder / f".{name}.unfinished"
        self.file = open(self._unfinished, "wb")  # noqa: SIM115

    def finish(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())  # otherwise a loss of power may leave the new name without content
        self.file.close()
        os.replace(self._unfinished, self._path)

    def discard(self) -> None:
        with contextlib.suppress(OSError):  # a full disk may fail to take what is still buffered
            self.file.close()
        with contextlib.suppress(OSError):
            self._unfinished.unlink(missing_ok=True)


class ArrowStorage(Storage):
    """A folder in one of pyarrow's filesystems. Object stores replace an object in one step."""

    def __init__(self, filesystem: Any, path: str, location: str):
        self.filesystem, self.path, self.location = filesystem, path, location

    def child(self, *names: str) -> Storage:
        return type(self)(self.filesystem, "/".join([self.path, *names]), "/".join([self.location, *names]))

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        with _os_errors(), self.filesystem.open_input_file(f"{self.path}/{name}") as file:
            rest = max(file.size() - offset, 0)
            size = rest if length is None else min(rest, length)
            # one request, so that all is of one version of the object; none for nothing, which some stores refuse
            return bytes(file.read_at(size, offset)) if size else b""

    def stage(self, name: str) -> Staged:
        return _ArrowStaged(self.filesystem, f"{self.path}/{name}")

    def files(self) -> dict[str, int]:
        return {info.base_name: info.size for info in self._infos() if info.is_file}

    def folders(self) -> list[str]:
        return sorted(info.base_name for info in self._infos() if not info.is_file)

    def exists(self) -> bool:
        return bool(self._infos())

    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError), _os_errors():
            self.filesystem.delete_file(f"{self.path}/{name}")

    def delete_all(self) -> None:
        with contextlib.suppress(FileNotFoundError), _os_errors():
            if self.exists():
                self.filesystem.delete_dir(self.path)

    def sync(self) -> None:
        """Do nothing, because an object that was written is there to stay."""

    def _infos(self, *, recursive: bool = False) -> list[Any]:
        """Return what pyarrow lists in this folder; `recursive`: and in the folders below it."""
        from pyarrow.fs import FileSelector

        with _os_errors():
            selected = FileSelector(self.path, allow_not_found=True, recursive=recursive)
            infos = self.filesystem.get_file_info(selected)
        return [info for info in infos if info.base_name]


class GoogleStorage(ArrowStorage):
    """A folder in Google Cloud Storage.

    pyarrow lists a folder there only if an object stands for it, which nobody has to make. The folders are therefore
    taken from the names of the objects below.
    """

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        if offset or length is not None:
            return super().read(name, offset, length)
        # a file would be asked for from its start when it is opened, and once more for what is read from it
        with _os_errors(), self.filesystem.open_input_stream(f"{self.path}/{name}", compression=None) as stream:
            return bytes(stream.read())

    def folders(self) -> list[str]:
        names = [info.path[len(self.path) + 1 :].partition("/") for info in self._infos(recursive=True)]
        return sorted({name for name, below, _ in names if below})

    def exists(self) -> bool:
        return super().exists() or bool(self._infos(recursive=True))


class _ArrowStaged(Staged):
    """Written to a local temporary file first, because a broken upload could become visible as a short object."""

    def __init__(self, filesystem: Any, path: str):
        self._filesystem, self._path = filesystem, path
        self.file = tempfile.TemporaryFile(prefix="rayfed-upload-")  # noqa: SIM115

    def finish(self) -> None:
        self.file.seek(0)
        # otherwise pyarrow would compress a file that is called .gz once more
        with _os_errors(), self._filesystem.open_output_stream(self._path, compression=None) as out:
            shutil.copyfileobj(self.file, out, 2**23)
        self.file.close()

    def discard(self) -> None:
        with contextlib.suppress(OSError):
            self.file.close()


def is_url(location: str | Path) -> bool:
    """Return whether `location` is a URL and not a path."""
    return "://" in str(location)


def open_storage(location: str | Path) -> Storage:
    """Return the folder at a path or URL; nothing is made or asked for yet.

    Args:
        location: A path, or a URL such as s3://bucket/results, gs://bucket/results or file:///results. Credentials and
            regions come from the environment, as the tools of the providers read it; options of pyarrow's filesystem
            may follow after a question mark.

    Raises:
        UsageError: The URL is malformed, has an unknown scheme, or pyarrow was built without its filesystem.
    """
    if not is_url(location):
        return LocalStorage(location)
    url = str(location)
    scheme, _, rest = url.partition("://")
    address, _, _ = rest.partition("?")
    if scheme == "file":
        if not address.startswith("/"):
            raise UsageError(f"results={location}: expected an absolute path after file://, such as file:///results")
        return LocalStorage(address)
    if scheme not in (*SCHEMES, "memory"):
        expected = ", ".join(f"{name}://" for name in SCHEMES)
        raise UsageError(f"results={location}: unknown scheme; expected a path or a URL that begins with {expected}")
    bucket, _, folder = address.strip("/").partition("/")
    user, _, bucket = bucket.rpartition("@")
    address = f"{bucket}/{folder}".strip("/")
    if not bucket:
        raise UsageError(f"results={location}: no bucket; expected {scheme}://BUCKET/FOLDER")
    try:
        with _os_errors():
            filesystem = _filesystem(scheme, bucket, url if user or "?" in rest else "")
    except (OSError, ImportError, ValueError) as error:
        raise UsageError(f"results={location}: cannot be reached ({one_line(error)})") from error
    kind = GoogleStorage if scheme == "gs" else ArrowStorage
    return kind(filesystem, address, f"{scheme}://{address}")


@functools.cache
def _filesystem(scheme: str, bucket: str, url: str) -> Any:
    """Return pyarrow's filesystem; `url` is given if it has options or a user."""
    from pyarrow import fs

    if scheme == "memory":
        import fsspec

        return fs.PyFileSystem(fs.FSSpecHandler(fsspec.filesystem("memory")))
    if url:
        if scheme == "gs" and "retry_limit_seconds=" not in url:  # otherwise pyarrow tries for 15 minutes
            url += f"{'&' if '?' in url else '?'}retry_limit_seconds={_RETRY_SECONDS}"
        return fs.FileSystem.from_uri(url)[0]
    variables = os.environ
    if scheme == "gs":
        limit = datetime.timedelta(seconds=_RETRY_SECONDS)
        if emulator := variables.get("STORAGE_EMULATOR_HOST"):  # as Google's own clients read it
            protocol, _, host = emulator.rstrip("/").rpartition("://")
            return fs.GcsFileSystem(
                anonymous=True, scheme=protocol or "http", endpoint_override=host, retry_time_limit=limit
            )
        _check_google_credentials()
        return fs.GcsFileSystem(retry_time_limit=limit)
    endpoint = variables.get("AWS_ENDPOINT_URL_S3") or variables.get("AWS_ENDPOINT_URL")
    region = variables.get("AWS_REGION") or variables.get("AWS_DEFAULT_REGION")
    if region is None and endpoint is None:
        region = fs.resolve_s3_region(bucket)
    return fs.S3FileSystem(
        region=region,
        endpoint_override=endpoint,
        connect_timeout=_CONNECT_SECONDS,
        request_timeout=_REQUEST_SECONDS,
        allow_delayed_open=True,  # one request for a small object, and not three
    )


def _check_google_credentials() -> None:
    """Raise OSError if there are no credentials for Google Cloud, after which pyarrow would search for two minutes."""
    variables = os.environ
    file = Path("~/.config/gcloud/application_default_credentials.json").expanduser()
    if variables.get("GOOGLE_APPLICATION_CREDENTIALS") or file.exists():
        return
    try:  # machines of Google Cloud ask this server
        socket.getaddrinfo(variables.get("GCE_METADATA_HOST", "metadata.google.internal"), 80)
    except OSError as error:
        raise OSError(
            "no credentials: set GOOGLE_APPLICATION_CREDENTIALS to a file of them, run gcloud auth application-default "
            "login, or write gs://anonymous@BUCKET for a public bucket"
        ) from error


@contextlib.contextmanager
def _os_errors() -> Iterator[None]:
    """Raise an OSError where pyarrow raises another exception for a failed request, with the store's own words."""
    import pyarrow as pa

    try:
        yield
    except (OSError, pa.ArrowException) as error:
        text = one_line(error)
        words = _GOOGLES_WORDS.search(text)
        if isinstance(error, OSError) and words is None:
            raise
        number = getattr(error, "errno", None)
        raise OSError(*([] if number is None else [number]), words[1] if words else text) from error


@contextlib.contextmanager
def storage_errors(location: str) -> Iterator[None]:
    """Raise `StorageError`, with one line that names `location`, in place of an OSError."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"results in {location}: {error.strerror or one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """Return the message of `error` on one line, or the name of its class."""
    return " ".join(str(error).split()) or type(error).__name__
