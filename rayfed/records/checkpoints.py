"""The files of a trial's checkpoints, `<experiment>/checkpoints/<trial>/`, as bytes; what they mean is the engine's.

A checkpoint has a manifest, `manifest-<number>.json`, which says where every part of the state is: the server's, and
one part per client. The parts that changed since the checkpoint before are in one new file, `segment-<number>.bin`, and
the others stay in the segments of earlier checkpoints. The manifest is written last, so a checkpoint exists with its
manifest or not at all, and the one before it is kept, and so is the one of the best round of which each of them knows.

Segments in which none of these manifests has a part are deleted. Parts move to the newest segment when less than
half of the bytes on disk are in use, or when there are more than `MAX_SEGMENTS` segments.
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rayfed.core.errors import StorageError
from rayfed.records.storage import Staged, Storage, one_line

FORMAT = 1
"""The version of the format. Checkpoints of other versions are refused."""
MAX_SEGMENTS = 256
BLOCK_BYTES = 32 * 2**20
"""The bytes that are sent, read or moved at a time."""
_FILE = re.compile(r"(manifest|segment)-(\d{6,})\.(json|bin)")
_HEADER = {"trial": str, "configuration": str, "rayfed": str, "round": int}


class NoCheckpoint(RuntimeError):
    """The recorder does not know of a checkpoint under way, since it was started again after the checkpoint began."""


class Part(NamedTuple):
    """Where a part of the state is: `length` bytes from `offset` in a segment, and their `checksum`."""

    segment: int
    offset: int
    length: int
    checksum: str


def checksum(content: bytes | memoryview) -> str:
    """Return the hash by which damaged bytes are noticed."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


class CheckpointStore:
    """Writes and reads the checkpoints of one trial. Only one process may write them.

    Args:
        home: The folder of the experiment.
    """

    def __init__(self, home: Storage, trial: str):
        self.folder = home.child("checkpoints", trial)
        self._others, self._old_file = home.child("checkpoints"), f"{trial}.pt"
        self._trial = trial
        self._staged: Staged | None = None
        self._size = self._number = 0
        self._base: int | None = None
        self._last: tuple[int, dict[str, Any]] | None = None  # what this object wrote last

    def begin(self, base: int | None) -> int:
        """Begin a checkpoint and return its number. One that was begun before and not committed is discarded.

        Args:
            base: The number of the checkpoint whose parts stay valid unless they are written anew; None: all parts are
                written.

        Raises:
            StorageError: The checkpoint `base` is gone.
        """
        self.discard()
        files = self.folder.files()
        for name in files:
            if name.startswith(".") and name.endswith(".unfinished"):  # a process was killed
                self.folder.delete(name)
        numbers = [number for _, number in _numbered(files)]
        if base is not None and (fault := self._fault(base, files)):
            raise StorageError(f"checkpoint {base} of {self._trial}, from which the next one continues, {fault}")
        self._base, self._number, self._size = base, max(numbers, default=0) + 1, 0
        self._staged = self.folder.stage(_segment(self._number))
        return self._number

    def append(self, block: bytes | memoryview) -> None:
        """Append bytes to the new segment.

        Raises:
            OSError: The disk is full or gone; the checkpoint is discarded.
        """
        with self._discarded_on_error() as staged:
            staged.write(block)
        self._size += len(block)

    def commit(self, header: Mapping[str, Any], server: Part, clients: Mapping[str, Part], size: int) -> None:
        """Finish the checkpoint; it then replaces the one before `base`.

        Args:
            header: The values of `trial`, `configuration`, `rayfed` and `round`, a mapping `progress` or none, and
                whether the state `is_best`, by default not.
            server: Where the server's state is in the new segment.
            clients: Where the states of clients are that were appended, by client.
            size: The bytes that were appended.

        Raises:
            OSError: The disk is full or gone; the checkpoint is discarded.
            StorageError: Blocks were lost, or a segment from which parts must move is damaged.
        """
        with self._discarded_on_error() as staged:
            if size != self._size:
                raise StorageError(f"checkpoint of {self._trial}: {self._size} of {size} bytes arrived")
            base = self._content(self._base) if self._base is not None else {"clients": {}, "segments": {}}
            parts = {client: Part(*part) for client, part in base["clients"].items()} | dict(clients)
            segments = {name: size for name, size in self.folder.files().items() if name.endswith(".bin")}
            parts = self._compacted(parts, segments, server.length)
            used = sorted({part.segment for part in parts.values()} | {self._number})
            content = {
                **{key: header[key] for key in _HEADER},
                "progress": header.get("progress", {}),
                "number": self._number,
                "server": list(server),
                "clients": {client: list(part) for client, part in parts.items()},
                "segments": {str(n): self._size if n == self._number else segments[_segment(n)] for n in used},
                "best": {"number": self._number, "segments": used} if header.get("is_best") else base.get("best"),
            }
            staged.finish()
            self.folder.sync()
            self._staged = None
            try:
                self.folder.write(_manifest(self._number), _encoded(content))
                self.folder.sync()
            except BaseException:
                with contextlib.suppress(OSError):
                    self.folder.delete(_segment(self._number))
                raise
        self._last = self._number, content
        with contextlib.suppress(OSError):  # what is left over now is deleted after the next checkpoint
            self._prune([content, base])

    def discard(self) -> None:
        """Remove the unfinished checkpoint, if there is one."""
        if self._staged is not None:
            self._staged.discard()
            self._staged = None

    def saved(self) -> list[dict[str, Any]]:
        """Return the checkpoints, newest first: {"number", "content"}, or {"number", "fault"} if one is damaged."""
        files = self.folder.files()
        numbers = sorted((number for kind, number in _numbered(files) if kind == "manifest"), reverse=True)
        checkpoints: list[dict[str, Any]] = []
        for number in numbers[:2]:
            try:
                content = _decoded(self.folder.read(_manifest(number)), number)
                if fault := _missing_bytes(content, files):
                    raise ValueError(fault)
                checkpoints.append({"number": number, "content": content})
            except (ValueError, OSError) as error:
                checkpoints.append({"number": number, "fault": one_line(error)})
        if not checkpoints and self._old_file in self._others.files():
            checkpoints.append({"number": 0, "fault": "is in the format of an earlier version of rayfed"})
        return checkpoints

    def best(self) -> dict[str, Any] | None:
        """Return the content of the manifest of the best round so far, None if it was not kept.

        Raises:
            StorageError: The manifest is damaged.
        """
        newest: dict[str, Any] = next((saved["content"] for saved in self.saved() if "content" in saved), {})
        if (best := newest.get("best")) is None:
            return None
        return self.manifest(best["number"])

    def manifest(self, number: int) -> dict[str, Any]:
        """Return the content of the manifest of a checkpoint.

        Raises:
            StorageError: It is gone or damaged.
        """
        try:
            return _decoded(self.folder.read(_manifest(number)), number)
        except (ValueError, OSError) as error:
            raise StorageError(f"checkpoint {number} of {self._trial} {one_line(error)}") from error

    def read(self, segment: int, offset: int, length: int) -> bytes:
        """Return bytes of a segment; fewer than `length` if it was cut off."""
        return self.folder.read(_segment(segment), offset, length)

    def blocks(self, part: Part) -> Iterator[bytes]:
        """Yield the bytes of a part in blocks.

        Raises:
            StorageError: After the last block, if the bytes are not those that were written.
        """
        digest = hashlib.blake2b(digest_size=16)
        for start in range(0, part.length, BLOCK_BYTES):
            block = self.read(part.segment, part.offset + start, min(BLOCK_BYTES, part.length - start))
            digest.update(block)
            yield block
        if digest.hexdigest() != part.checksum:
            raise StorageError(f"{self.folder.location}: {_segment(part.segment)} is damaged")

    def exists(self) -> bool:
        """Return whether there is a checkpoint, whole or not."""
        return any(kind == "manifest" for kind, _ in _numbered(self.folder.files()))

    def delete(self) -> None:
        """Delete all checkpoints of the trial, also one in an earlier format."""
        self.discard()
        self._last = None
        # The manifests go first, so that what a kill leaves of a deletion is not taken for a damaged checkpoint.
        for kind, number in sorted(_numbered(self.folder.files())):
            self.folder.delete(_manifest(number) if kind == "manifest" else _segment(number))
        self.folder.delete_all()
        self._others.delete(self._old_file)

    @contextlib.contextmanager
    def _discarded_on_error(self) -> Iterator[Staged]:
        if self._staged is None:
            raise NoCheckpoint(f"no checkpoint of {self._trial} was begun")
        try:
            yield self._staged
        except BaseException:
            self.discard()
            raise

    def _content(self, number: int) -> dict[str, Any]:
        if self._last is None or self._last[0] != number:
            self._last = number, _decoded(self.folder.read(_manifest(number)), number)
        return self._last[1]

    def _fault(self, number: int, files: Mapping[str, int]) -> str | None:
        if _manifest(number) not in files:
            return "is gone"
        try:
            return _missing_bytes(self._content(number), files)
        except (ValueError, OSError) as error:
            return one_line(error)

    def _compacted(self, parts: Mapping[str, Part], segments: Mapping[str, int], server_bytes: int) -> dict[str, Part]:
        """Move parts out of old segments that are mostly unused, or too many, and return where all parts are then."""
        in_use: dict[int, dict[str, Part]] = {}
        for client, part in parts.items():
            if part.segment != self._number:
                in_use.setdefault(part.segment, {})[client] = part
        sizes = {number: segments[_segment(number)] for number in in_use}
        used = {number: sum(part.length for part in held.values()) for number, held in in_use.items()}
        live = sum(part.length for part in parts.values()) + server_bytes
        by_use = sorted(in_use, key=lambda number: used[number] / max(1, sizes[number]))
        by_size = sorted(in_use, key=lambda number: used[number])
        moved: set[int] = set()
        total = sum(sizes.values()) + self._size
        for number in by_use:
            if 2 * live >= total:
                break
            moved.add(number)
            total -= sizes[number] - used[number]
        if len(in_use) - len(moved) >= MAX_SEGMENTS:
            moved |= set(by_size[: MAX_SEGMENTS // 2])
        return dict(parts) | {
            client: part for number in sorted(moved) for client, part in self._moved(in_use[number], self).items()
        }

    def _moved(self, parts: Mapping[str, Part], source: "CheckpointStore") -> dict[str, Part]:
        """Copy parts of one segment of `source` to the end of the new one."""
        moved = {}
        for client, part in sorted(parts.items(), key=lambda item: item[1].offset):
            offset = self._size
            for block in source.blocks(part):
                self.append(block)
            moved[client] = Part(self._number, offset, part.length, part.checksum)
        return moved

    def _prune(self, contents: Sequence[Mapping[str, Any]]) -> None:
        """Delete every manifest but the new one, its base and the best of each, and the segments that none needs."""
        bests = [content["best"] for content in contents if content.get("best")]
        manifests = {self._number, self._base, *(best["number"] for best in bests)}
        segments = {int(number) for content in contents for number in content["segments"]}
        segments |= {number for best in bests for number in best["segments"]}
        for kind, number in _numbered(self.folder.files()):
            if kind == "manifest" and number not in manifests:
                self.folder.delete(_manifest(number))
            elif kind == "segment" and number not in segments:
                self.folder.delete(_segment(number))


def _manifest(number: int) -> str:
    return f"manifest-{number:06d}.json"


def _segment(number: int) -> str:
    return f"segment-{number:06d}.bin"


def _numbered(files: Mapping[str, int]) -> list[tuple[str, int]]:
    matches = (_FILE.fullmatch(name) for name in files)
    return [(match[1], int(match[2])) for match in matches if match]


def _canonical(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def _encoded(content: Mapping[str, Any]) -> bytes:
    return _canonical({"format": FORMAT, "checksum": checksum(_canonical(content)), "content": content})


def _decoded(text: bytes, number: int) -> dict[str, Any]:
    """Return the content of a manifest.

    Raises:
        ValueError: It is damaged, or of another version; the message goes on from "checkpoint 7 of trial".
    """
    try:
        tree = json.loads(text)
    except ValueError as error:
        raise ValueError(f"is damaged: its manifest is not JSON ({one_line(error)})") from error
    if not isinstance(tree, dict) or "format" not in tree:
        raise ValueError("is damaged: its manifest has no format version")
    if tree["format"] != FORMAT:
        raise ValueError(f"has format {tree['format']!r}; this version of rayfed reads format {FORMAT}")
    content = tree.get("content")
    if not isinstance(content, dict) or checksum(_canonical(content)) != tree.get("checksum"):
        raise ValueError("is damaged: its manifest does not match its checksum")
    for key, kind in (*_HEADER.items(), ("number", int), ("server", list), ("clients", dict), ("segments", dict)):
        if type(content.get(key)) is not kind:
            raise ValueError(f"is damaged: {key} in its manifest is not {_ARTICLES[kind]}")
    if type(content.get("progress", {})) is not dict:  # manifests of earlier versions have none
        raise ValueError("is damaged: progress in its manifest is not a mapping")
    if content["number"] != number:
        raise ValueError(f"is damaged: its manifest is that of checkpoint {content['number']}")
    for name, size in content["segments"].items():
        if not name.isdecimal() or type(size) is not int or size < 0:
            raise ValueError("is damaged: segments in its manifest are not sizes by number")
    for name, part in (("server", content["server"]), *content["clients"].items()):
        if name != "server" and not name.isdecimal():
            raise ValueError(f"is damaged: {name!r} in its manifest is not the number of a client")
        if not _is_part(part, content["segments"]):
            raise ValueError(f"is damaged: the place of {'client ' * (name != 'server')}{name} is not in its segments")
    return content


_ARTICLES = {str: "a string", int: "an integer", list: "a list", dict: "a mapping"}


def _is_part(part: Any, segments: Mapping[str, int]) -> bool:
    return (
        isinstance(part, list)
        and [type(value) for value in part] == [int, int, int, str]
        and min(part[1:3]) >= 0
        and part[1] + part[2] <= segments.get(str(part[0]), -1)
    )


def _missing_bytes(content: Mapping[str, Any], files: Mapping[str, int]) -> str | None:
    """Return what is wrong with the segments of a checkpoint, by their sizes."""
    for number, size in content["segments"].items():
        name = _segment(int(number))
        if name not in files:
            return f"is damaged: {name} is gone"
        if files[name] < size:
            return f"is damaged: {name} has {files[name]} of {size} bytes"
    return None
