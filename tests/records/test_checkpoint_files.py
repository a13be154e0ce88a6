"""The files of checkpoints: states survive any sequence of checkpoints, and files do not pile up."""

import json
import os
import random

import pytest

from rayfed.core.errors import StorageError, UsageError
from rayfed.records import checkpoint_store
from rayfed.records.checkpoint_store import CheckpointStore, SavedPart, checksum
from rayfed.records.storage import open_storage

HEADER = {"trial": "t", "configuration": "c", "rayfed": "0", "round": 1}


def commit(store, base, server, clients, **header):
    """Write one checkpoint of bytes and return its number."""
    number, contents = store.begin(), {"server": server, **clients}
    for name, content in contents.items():
        store.write(number, {name: content})
    parts = {name: SavedPart(number, len(content), checksum(content)) for name, content in contents.items()}
    store.commit(number, base, {**HEADER, **header}, parts)
    return number


def contents(store, content):
    """Return all states of a checkpoint, whose checksums must be right."""
    parts = {name: SavedPart(*part) for name, part in {"server": content["server"], **content["clients"]}.items()}
    read = store.read(parts)
    assert all(checksum(read[name]) == part.checksum for name, part in parts.items())
    return read


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(open_storage(tmp_path), "t")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints/t"


@pytest.mark.parametrize("seed", range(3))
def test_the_last_two_and_the_best_are_whole_and_nothing_else_is_kept(store, folder, seed):
    draw = random.Random(seed)
    state: dict[str, bytes] = {}
    history, base, best = {}, None, None
    for _ in range(30):
        chosen = {str(draw.randrange(40)): draw.randbytes(draw.randrange(1, 3000)) for _ in range(draw.randrange(1, 6))}
        server = draw.randbytes(draw.randrange(1, 4000))
        state |= chosen
        is_best, before = draw.random() < 0.2, best
        base = commit(store, base, server, chosen, is_best=is_best)
        best = base if is_best else best
        history[base] = {"server": server, **state}
        saved = store.saved()
        assert [contents(store, one["content"]) for one in saved] == [history[n] for n in (base, base - 1) if n]
        assert (best and contents(store, store.best())) == (best and history[best])
        manifests = [store.manifest(number) for number in {base, base - 1, best, before} - {0, None}]
        named = {
            f"{name}-{part[0]:06d}.pt"
            for content in manifests
            for name, part in {"server": content["server"], **content["clients"]}.items()
        }
        assert {path.name for path in folder.glob("*.pt")} == named
        assert len(list(folder.glob("*.json"))) == len(manifests)


def test_another_writer_goes_on_from_either_of_the_two(store, tmp_path):
    for number in range(1, 4):
        commit(store, number - 1 or None, b"s", {"1": bytes([number]), "2": b"x" * number})
    other = CheckpointStore(open_storage(tmp_path), "t")
    assert commit(other, 2, b"t", {"2": b"new"}) == 4
    assert [one["number"] for one in other.saved()] == [4, 2]  # 3 was not continued
    assert contents(other, other.saved()[0]["content"]) == {"server": b"t", "1": b"\2", "2": b"new"}
    with pytest.raises(StorageError, match=r"checkpoint 3 of t is gone"):
        commit(other, 3, b"t", {})


def test_what_a_kill_left_is_removed(store, folder):
    commit(store, None, b"s", {"1": b"one"})
    for name in (".1-000002.pt.unfinished", ".manifest-000002.json.unfinished", "1-000002.pt", "server-000002.pt"):
        (folder / name).write_bytes(b"half")
    assert commit(store, 1, b"s", {"1": b"uno"}) == 3
    assert {path.name for path in folder.iterdir()} == {
        f"{name}-00000{number}.{end}"
        for number in (1, 3)
        for name, end in (("manifest", "json"), ("server", "pt"), (1, "pt"))
    }


@pytest.mark.parametrize("failing", ["server", "1-", "manifest"])
def test_a_full_disk_leaves_the_old_ones_and_no_litter(store, folder, monkeypatch, failing):
    commit(store, None, b"s", {"1": b"one"})
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    replace = os.replace

    def full(unfinished, path):
        if path.name.startswith(failing):
            raise OSError(28, "No space left on device")
        replace(unfinished, path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="No space left"):
            commit(store, 1, b"s", {"1": b"uno"})
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    commit(store, 1, b"t", {"1": b"uno"})
    assert contents(store, store.saved()[0]["content"]) == {"server": b"t", "1": b"uno"}


@pytest.mark.parametrize("number", [7, "none"])
def test_a_checkpoint_with_another_schema_is_refused(store, folder, number):
    commit(store, None, b"s", {"1": b"one"})
    manifest = folder / "manifest-000001.json"
    tree = json.loads(manifest.read_bytes()) | {"schema": number}
    manifest.write_text(json.dumps({k: v for k, v in tree.items() if v != "none"}))
    refusal = f"{manifest.name}: has schema {number}, .* reads schema {checkpoint_store.SCHEMA}; give another"
    with pytest.raises(UsageError, match=refusal):
        store.saved()
