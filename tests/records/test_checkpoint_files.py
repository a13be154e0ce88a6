"""The files of checkpoints: parts survive any sequence of checkpoints, and neither files nor bytes pile up."""

import json
import random

import pytest

from rayfed.core.errors import StorageError
from rayfed.records import checkpoints
from rayfed.records.checkpoints import CheckpointStore, NoCheckpoint, Part, checksum
from rayfed.records.storage import open_storage

HEADER = {"trial": "t", "configuration": "c", "rayfed": "0", "round": 1}


def commit(store, base, server, clients):
    """Write one checkpoint of bytes and return its number."""
    number, size, parts = store.begin(base), 0, {}
    for name, content in {"server": server, **clients}.items():
        store.append(content)
        parts[name] = Part(number, size, len(content), checksum(content))
        size += len(content)
    store.commit(HEADER, parts.pop("server"), parts, size)
    return number


def contents(store, saved):
    """Return all parts of a checkpoint, whose checksums must be right."""
    parts = {"server": saved["content"]["server"], **saved["content"]["clients"]}
    read = {name: store.read(*part[:3]) for name, part in parts.items()}
    assert all(checksum(read[name]) == part[3] for name, part in parts.items())
    return read


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(open_storage(tmp_path), "t")


@pytest.mark.parametrize("seed", range(4))
def test_the_last_two_are_whole_and_space_and_files_are_bounded(store, tmp_path, monkeypatch, seed):
    monkeypatch.setattr(checkpoints, "MAX_SEGMENTS", 8)
    draw = random.Random(seed)
    state: dict[str, bytes] = {}
    history, base = [], None
    for _ in range(60):
        chosen = {str(draw.randrange(40)): draw.randbytes(draw.randrange(1, 3000)) for _ in range(draw.randrange(1, 6))}
        server = draw.randbytes(draw.randrange(1, 4000))
        state |= chosen
        base = commit(store, base, server, chosen)
        history.append({"server": server, **state})
        saved = store.saved()
        assert [contents(store, one) for one in saved] == history[-1:-3:-1]
        for one in saved:
            live, segments = sum(map(len, contents(store, one).values())), one["content"]["segments"]
            assert sum(segments.values()) <= 2 * live + 1
            assert len(segments) <= 8 + 1
        files = sorted(path.name for path in (tmp_path / "checkpoints/t").iterdir())
        used = {int(number) for one in saved for number in one["content"]["segments"]}
        assert files == sorted(
            [checkpoints._segment(n) for n in used] + [f"manifest-{one['number']:06d}.json" for one in saved]
        )


def test_only_what_is_new_is_written(store):
    commit(store, None, b"s" * 10, {str(client): bytes(1000) for client in range(100)})
    commit(store, 1, b"s" * 10, {"7": bytes(500)})
    newest = store.saved()[0]["content"]
    assert newest["segments"] == {"1": 100_010, "2": 510}
    assert [client for client, part in newest["clients"].items() if part[0] == 2] == ["7"]


def test_another_writer_goes_on_from_either_of_the_two(store, tmp_path):
    for number in range(1, 4):
        commit(store, number - 1 or None, b"s", {"1": bytes([number]), "2": b"x" * number})
    other = CheckpointStore(open_storage(tmp_path), "t")
    assert commit(other, 2, b"t", {"2": b"new"}) == 4
    assert [one["number"] for one in other.saved()] == [4, 2]  # 3 was not continued
    assert contents(other, other.saved()[0]) == {"server": b"t", "1": b"\2", "2": b"new"}
    with pytest.raises(StorageError, match=r"checkpoint 3 of t, from which the next one continues, is gone"):
        other.begin(3)


def test_blocks_that_got_lost_are_noticed(store):
    commit(store, None, b"s", {"1": b"one"})
    number = store.begin(1)
    store.append(b"half")
    with pytest.raises(StorageError, match="4 of 8 bytes arrived"):
        store.commit(HEADER, Part(number, 0, 8, ""), {}, 8)
    with pytest.raises(NoCheckpoint, match="no checkpoint of t was begun"):
        store.append(b"more")
    assert contents(store, store.saved()[0]) == {"server": b"s", "1": b"one"}


def test_a_damaged_part_is_not_copied_on(store, tmp_path):
    commit(store, None, b"s", {"1": b"one", "2": b"two" * 100})
    path = tmp_path / "checkpoints/t/segment-000001.bin"
    path.write_bytes(b"sOne" + path.read_bytes()[4:])
    with pytest.raises(StorageError, match=r"segment-000001\.bin is damaged"):
        commit(store, 1, b"s", {"2": b""})  # now most of segment 1 is unused, and client 1 moves
    assert [one["number"] for one in store.saved()] == [1]
    assert not (tmp_path / "checkpoints/t/segment-000002.bin").exists()


def test_what_a_kill_left_is_removed(store, tmp_path):
    commit(store, None, b"s", {"1": b"one"})
    folder = tmp_path / "checkpoints/t"
    for name in (".segment-000002.bin.unfinished", ".manifest-000002.json.unfinished", "segment-000002.bin"):
        (folder / name).write_bytes(b"half")
    assert commit(store, 1, b"s", {"1": b"uno"}) == 3
    assert sorted(path.name for path in folder.iterdir()) == [
        *("manifest-000001.json", "manifest-000003.json", "segment-000001.bin", "segment-000003.bin")
    ]


@pytest.mark.parametrize("failing", ["segment", "manifest"])
def test_a_full_disk_leaves_the_old_ones_and_no_litter(store, tmp_path, monkeypatch, failing):
    commit(store, None, b"s", {"1": b"one"})
    before = {path.name: path.read_bytes() for path in (tmp_path / "checkpoints/t").iterdir()}
    from rayfed.records import storage

    write = storage.Staged.write

    def full(self, content):
        if self._name.startswith(failing):
            raise OSError(28, "No space left on device")
        write(self, content)

    with monkeypatch.context() as patch:
        patch.setattr(storage.Staged, "write", full)
        with pytest.raises(OSError, match="No space left"):
            commit(store, 1, b"s", {"1": b"uno"})
    assert {path.name: path.read_bytes() for path in (tmp_path / "checkpoints/t").iterdir()} == before
    commit(store, 1, b"t", {"1": b"uno"})
    assert contents(store, store.saved()[0]) == {"server": b"t", "1": b"uno"}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda c: c.update(number=7), "its manifest is that of checkpoint 7"),
        (lambda c: c.update(round=None), "round in its manifest is not an integer"),
        (lambda c: c.update(round=True), "round in its manifest is not an integer"),
        (lambda c: c.pop("trial"), "trial in its manifest is not a string"),
        (lambda c: c.update(clients=[]), "clients in its manifest is not a mapping"),
        (lambda c: c["clients"].update(x=c["server"]), "'x' in its manifest is not the number of a client"),
        (lambda c: c["clients"].update({"1": [1, 0, 999, ""]}), "the place of client 1 is not in its segments"),
        (lambda c: c["clients"].update({"1": [1, -1, 1, ""]}), "the place of client 1 is not in its segments"),
        (lambda c: c.update(server=[9, 0, 1, ""]), "the place of server is not in its segments"),
        (lambda c: c.update(segments={"1": "4"}), "segments in its manifest are not sizes by number"),
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused(store, tmp_path, change, fault):
    commit(store, None, b"s", {"1": b"one"})
    path = tmp_path / "checkpoints/t/manifest-000001.json"
    content = json.loads(path.read_text())["content"]
    change(content)
    path.write_bytes(checkpoints._encoded(content))
    assert store.saved() == [{"number": 1, "fault": f"is damaged: {fault}"}]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (b"", "is damaged: its manifest is not JSON"),
        (b"\xff\xfe", "is damaged: its manifest is not JSON"),
        (b"[]", "is damaged: its manifest has no format version"),
        (b'{"format": 2}', "has format 2; this version of rayfed reads format 1"),
        (b'{"format": 1}', "is damaged: its manifest does not match its checksum"),
        (b'{"format": 1, "content": {}, "checksum": "00"}', "is damaged: its manifest does not match its checksum"),
    ],
)
def test_other_texts_are_refused(store, tmp_path, text, fault):
    commit(store, None, b"s", {"1": b"one"})
    (tmp_path / "checkpoints/t/manifest-000001.json").write_bytes(text)
    (saved,) = store.saved()
    assert saved["fault"].startswith(fault)


def test_the_earlier_format_is_told_and_a_new_start_removes_it(store, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/t.pt").write_bytes(b"anything")
    assert store.saved() == [{"number": 0, "fault": "is in the format of an earlier version of rayfed"}]
    store.delete()
    assert store.saved() == []
    assert not (tmp_path / "checkpoints/t.pt").exists()
