"""The files of a trial's checkpoints, `<experiment>/checkpoints/<trial>/`, as bytes; the engine knows what they mean.

Every state has a file of its own, `server-<number>.pt`, `<client>-<number>.pt` or `version_<start>-<number>.pt`, with
the number of the checkpoint that wrote it. A checkpoint writes the states that have changed since the last one, and
then its manifest, `manifest-<number>.json`, which names the file of every state. A checkpoint without a manifest does
not exist. The last two checkpoints are kept, and that of the best round that each of them knows. Other files
with such names are deleted.
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import NoneType
from typing import Any, NamedTuple, TypeVar

from rayfed.core.errors import StorageError, one_line, shown
from rayfed.records.files import SCHEMA, check_schema
from rayfed.records.storage import Storage, finished_name

BLOCK_BYTES = 32 * 2**20
"""The bytes of states that are sent or read together."""
Saved = Sequence[Mapping[str, Any]]
"""The checkpoints of a trial, newest first, as `CheckpointStore.saved` returns them; empty without any."""
_THREADS = 16  # disks, and object stores even more, take several files at a time
_CLIENT = re.compile(r"[0-9]+")
_VERSION = re.compile(r"version_[0-9]+")
_FILE = re.compile(r"(manifest|server|version_[0-9]+|[0-9]+)-([0-9]{6,18})\.(?:json|pt)")
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class SavedPart(NamedTuple):
    """The file of a state: the `number` of the checkpoint that wrote it, its `length` in bytes, and its `checksum`."""

    number: int
    length: int
    checksum: str


def checksum(content: bytes | memoryview) -> str:
    """Return the hash that tells damaged bytes from whole ones."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


class CheckpointStore:
    """Writes and reads the checkpoints of one trial. Only one process may write.

    Args:
        home: The folder of the experiment.
        pinned: The numbers of further checkpoints to keep.
    """

    def __init__(self, home: Storage, trial: str, pinned: Iterable[int] = ()):
        self.folder = home.child("checkpoints", trial)
        self._trial = trial
        self._pinned = frozenset(pinned)

    def begin(self) -> int:
        """Return the number of the next checkpoint."""
        numbers = [number for _, number, _ in self._files()]
        return max(numbers, default=0) + 1

    def write(self, number: int, states: Mapping[str, bytes]) -> None:
        """Write states by name ("server", or a client's number) for the checkpoint `number`.

        Raises:
            OSError: The disk is full or gone; nothing is left of the checkpoint.
        """
        with self._discarded_on_error(number):

            def write_state(name: str) -> None:
                self.folder.write(_state_file(name, number), states[name])

            _in_parallel(write_state, states)

    def commit(self, number: int, base: int | None, header: Mapping[str, Any], parts: Mapping[str, SavedPart]) -> None:
        """Finish a checkpoint.

        Args:
            base: The checkpoint whose states stay valid where `parts` has no newer ones; None if `parts` has all.
            header: `trial`, `configuration`, `rayfed` and `round`; optionally `progress`, the parts of the `ring` of
                versions, and whether the state `is_best`.
            parts: The states that were written for this checkpoint, the server's included.

        Raises:
            OSError: The disk is full or gone; nothing is left of the checkpoint.
            StorageError: The checkpoint `base` is gone.
        """
        with self._discarded_on_error(number):
            before: dict[str, Any] = {"clients": {}, "best": None}
            if base is not None:
                before = self.manifest(base)
            clients = dict(before["clients"])
            for name, part in parts.items():
                if name != "server":
                    clients[name] = list(part)
            best = before["best"]
            if header.get("is_best"):
                best = number
            content = {
                "trial": header["trial"],
                "configuration": header["configuration"],
                "rayfed": header["rayfed"],
                "round": header["round"],
                "progress": header.get("progress", {}),
                "number": number,
                "server": list(parts["server"]),
                "clients": clients,
                "ring": header.get("ring", {}),
                "best": best,
            }
            self.folder.sync()
            self.folder.write(_manifest_file(number), _encoded(content))
            self.folder.sync()
        with contextlib.suppress(OSError, StorageError):  # files that stay are deleted after the next checkpoint
            kept = [content]
            if base is not None:
                kept.append(before)
            self._prune(kept)

    def adopt(self, other: "CheckpointStore", number: int, configuration: str) -> None:
        """Copy a checkpoint of another trial, from which this one goes on with other hyperparameters.

        Args:
            configuration: The hash of the configuration with which this trial goes on.

        Raises:
            OSError: The disk is full or gone; nothing is left of the copy.
            StorageError: The checkpoint is gone or damaged.
        """
        content = other.manifest(number)
        own = self.begin()
        parts = {}
        for name, part in _parts(content).items():
            self.write(own, other.read({name: part}))
            parts[name] = part._replace(number=own)
        header = {
            "trial": self._trial,
            "configuration": configuration,
            "rayfed": content["rayfed"],
            "round": content["round"],
            "progress": content["progress"],
            "ring": {name: list(parts.pop(name)) for name in content["ring"]},
        }
        self.commit(own, None, header, parts)

    def saved(self) -> list[dict[str, Any]]:
        """Return the last two checkpoints, newest first: {"number", "content"}, or {"number", "fault"} if damaged.

        Raises:
            UsageError: They have another schema than this version of rayfed.
        """
        sizes = {}
        numbers = []
        for kind, number, size in self._files():
            sizes[kind, number] = size
            if kind == "manifest":
                numbers.append(number)
        checkpoints: list[dict[str, Any]] = []
        for number in sorted(numbers, reverse=True)[:2]:
            try:
                content = self._content(number)
                _check_sizes(content, sizes)
                checkpoints.append({"number": number, "content": content})
            except (StorageError, OSError) as error:
                checkpoints.append({"number": number, "fault": one_line(error)})
        return checkpoints

    def best(self) -> dict[str, Any] | None:
        """Return the content of the manifest of the best round so far; None if that was not kept.

        Raises:
            StorageError: The manifest is damaged.
        """
        contents = (saved["content"] for saved in self.saved() if "content" in saved)
        newest: dict[str, Any] = next(contents, {})
        if newest.get("best") is None:
            return None
        return self.manifest(newest["best"])

    def manifest(self, number: int) -> dict[str, Any]:
        """Return the content of the manifest of a checkpoint.

        Raises:
            StorageError: It is gone or damaged.
        """
        try:
            return self._content(number)
        except (StorageError, OSError) as error:
            reason = "is gone"
            if not isinstance(error, FileNotFoundError):
                reason = one_line(error)
            raise StorageError(f"checkpoint {number} of {self._trial} {reason}") from error

    def read(self, parts: Mapping[str, SavedPart]) -> dict[str, bytes]:
        """Return the bytes of states by name, without a check of their checksums."""

        def read_state(name: str) -> bytes:
            return self.folder.read(_state_file(name, parts[name].number))

        contents = _in_parallel(read_state, parts)
        return dict(zip(parts, contents, strict=True))

    def exists(self) -> bool:
        """Return whether there is a checkpoint, which may be damaged."""
        return any(kind == "manifest" for kind, _, _ in self._files())

    def delete(self) -> None:
        """Delete all checkpoints of the trial."""
        # Manifests are deleted first: if this is killed, the files that are left are not taken for a checkpoint.
        for kind, number, _ in self._files():
            if kind == "manifest":
                self.folder.delete(_manifest_file(number))
        self.folder.delete_all()

    @contextlib.contextmanager
    def _discarded_on_error(self, number: int) -> Iterator[None]:
        try:
            yield
        except BaseException:
            with contextlib.suppress(OSError):
                written = [name for name in self.folder.files() if f"-{number:06d}." in name]
                _in_parallel(self.folder.delete, written)
            raise

    def _content(self, number: int) -> dict[str, Any]:
        file = _manifest_file(number)
        place = f"{self.folder.location}/{file}"
        content = _decoded(self.folder.read(file), place)
        if content["number"] != number:
            raise StorageError(f"is damaged: its manifest is that of checkpoint {content['number']}")
        return content

    def _files(self) -> list[tuple[str, int, int]]:
        """Return the kind ("manifest", "server", a version or a client), the number and the size of each file."""
        found = []
        for name, size in self.folder.files().items():
            match = _FILE.fullmatch(name)
            if match:
                found.append((match[1], int(match[2]), size))
        return found

    def _prune(self, contents: list[dict[str, Any]]) -> None:
        """Delete every file that the checkpoints of `contents`, and their best rounds, do not need."""
        kept = {content["number"] for content in contents}
        present = {number for kind, number, _ in self._files() if kind == "manifest"}
        others = {content["best"] for content in contents} - {None, *kept}
        others |= (self._pinned & present) - kept
        needed = set()
        for content in (*contents, *map(self._content, others)):
            needed.add(_manifest_file(content["number"]))
            for name, part in _parts(content).items():
                needed.add(_state_file(name, part.number))
        needless = []
        for name in self.folder.files():
            if name not in needed and _FILE.fullmatch(finished_name(name)):
                needless.append(name)
        _in_parallel(self.folder.delete, needless)


def _in_parallel(function: Callable[[_Item], _Result], items: Iterable[_Item]) -> list[_Result]:
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(function, items))


def _manifest_file(number: int) -> str:
    return f"manifest-{number:06d}.json"


def _state_file(name: str, number: int) -> str:
    return f"{name}-{number:06d}.pt"


def _parts(content: Mapping[str, Any]) -> dict[str, SavedPart]:
    """Return the parts that the content of a manifest names."""
    parts = {"server": content["server"], **content["clients"], **content.get("ring", {})}
    return {name: SavedPart(*part) for name, part in parts.items()}


def _check_sizes(content: Mapping[str, Any], sizes: Mapping[tuple[str, int], int]) -> None:
    """Raise StorageError if a file that a manifest names has another size than it was written with."""
    for name, part in _parts(content).items():
        size = sizes.get((name, part.number), 0)
        if size != part.length:
            file = _state_file(name, part.number)
            raise StorageError(f"is damaged: {file} has {size} of {part.length} bytes")


def _canonical(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def _encoded(content: Mapping[str, Any]) -> bytes:
    return _canonical({"schema": SCHEMA, "checksum": checksum(_canonical(content)), "content": content})


def _decoded(text: bytes, where: str) -> dict[str, Any]:
    """Return the content of a manifest.

    Raises:
        StorageError: It is damaged; the message goes on from "checkpoint 7 of trial".
        UsageError: It has another schema.
    """
    try:
        tree = json.loads(text)
        number = tree.get("schema", "none")
        content = tree.get("content")
        expected = tree.get("checksum")
    except (ValueError, AttributeError, RecursionError) as error:
        raise StorageError(f"is damaged: its manifest is not the JSON that rayfed wrote ({one_line(error)})") from error
    check_schema(number, where)
    if not isinstance(content, dict) or checksum(_canonical(content)) != expected:
        raise StorageError("is damaged: its manifest does not match its checksum")
    try:
        _check_fields(content, _FIELDS)
        _check_parts(content)
        if content["progress"]:
            _check_fields(content["progress"], _PROGRESS)
            _check_fields(content["progress"]["early_stopping"], {"reason": (str, NoneType)})
    except ValueError as error:
        raise StorageError(f"is damaged: {error}") from error
    return content


_FIELDS: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("trial", "configuration", "rayfed"), (str,)),
    **dict.fromkeys(("round", "number"), (int,)),
    **dict.fromkeys(("progress", "clients", "ring"), (dict,)),
    "server": (list,),
    "best": (int, NoneType),
}
"""The fields of a manifest. Its checksum shows damage, and not who wrote it."""
_PROGRESS: Mapping[str, tuple[type, ...]] = {
    "rounds": (int,),
    "finished": (bool,),
    "vmap_clients": (int, NoneType),
    "early_stopping": (dict,),
    "best": (dict,),
}
"""The fields of `progress` that every trial has; the engine knows what they mean."""
_PART_TYPES = [int, int, str]


def _check_fields(values: Mapping[str, Any], fields: Mapping[str, tuple[type, ...]]) -> None:
    """Raise ValueError if a field is missing, or has a value of another type."""
    for name, kinds in fields.items():
        if type(values.get(name, ...)) not in kinds:
            raise ValueError(f"its manifest has no usable {name}")


def _check_parts(content: Mapping[str, Any]) -> None:
    """Raise ValueError if a part of a manifest is none, or its name is not that of a state."""
    clients = dict.fromkeys(content["clients"], _CLIENT)
    names = clients | dict.fromkeys(content["ring"], _VERSION)
    for name, pattern in names.items():
        if not pattern.fullmatch(name):
            raise ValueError(f"its manifest names the state {shown(name)}")
    others = [*content["clients"].values(), *content["ring"].values()]
    for part in (content["server"], *others):
        if not isinstance(part, list) or list(map(type, part)) != _PART_TYPES:
            raise ValueError(f"its manifest names the part {shown(part)}")
