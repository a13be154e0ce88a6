"""Saving and restoring a simulation: only what changed is written, and any damage is noticed."""

import json
import os
import signal
import tracemalloc
import weakref
from types import SimpleNamespace

import pytest
import torch

from helpers.checkpoints import CheckpointRecorder
from helpers.federations import blobs, blueprint
from rayfed.algorithms.scaffold import Scaffold
from rayfed.core.errors import StorageError, UsageError
from rayfed.core.ids import ClientIndex
from rayfed.engine import checkpoint
from rayfed.engine.checkpoint import Checkpointer, verified
from rayfed.engine.client_store import ClientStates
from rayfed.engine.fleet import LocalFleet
from rayfed.engine.server import Evaluation, Server
from rayfed.records import checkpoints, storage

ROUNDS, COHORT, CLIENTS = 9, 3, 12
PEOPLE = blobs(CLIENTS, sizes=(12, 15))
PLAN = blueprint(Scaffold(), PEOPLE, rounds=ROUNDS, cohort=COHORT)


def new_server():
    return Server(PLAN, PEOPLE, LocalFleet(PLAN, PEOPLE), Evaluation(points=()))


def checkpointer(server, recorder, configuration="c"):
    return Checkpointer(server, recorder, "t", configuration, "0")


@pytest.fixture(scope="module")
def outcome():
    server = new_server()
    list(server.run())
    return server.state_hash()


@pytest.fixture
def recorder(tmp_path):
    return CheckpointRecorder(str(tmp_path), "e")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "e/checkpoints/t"


def run_and_save(recorder, last, server=None, saver=None):
    server = server or new_server()
    saver = saver or checkpointer(server, recorder)
    for record in server.run():
        saver.save()
        if record.round == last:
            break
    return server, saver


def resumed_outcome(recorder):
    server = new_server()
    saver = checkpointer(server, recorder)
    if saved := recorder.saved("t"):
        saver.restore(saved)
    run_and_save(recorder, None, server, saver)
    return server.state_hash()


def test_each_checkpoint_writes_the_server_and_the_cohort_alone(recorder, folder):
    server, saver = new_server(), None
    seen = set()
    for record in server.run():
        saver = saver or checkpointer(server, recorder)
        saver.save()
        newest = recorder.saved("t")[0]["content"]
        cohort, seen = set(server.sample(record.round)), seen | set(server.sample(record.round))
        assert {int(name) for name in newest["clients"]} == seen
        written = {int(name) for name, part in newest["clients"].items() if part[0] == newest["number"]}
        assert cohort <= written
        sizes = [part[2] for name, part in newest["clients"].items() if int(name) in written]
        assert (folder / f"segment-{newest['number']:06d}.bin").stat().st_size == sum(sizes) + newest["server"][2]
        if record.round <= 3:  # before anything is compacted
            assert written == cohort
    assert len(list(folder.glob("manifest-*"))) == 2


@pytest.mark.parametrize("last", [1, 4, ROUNDS])
def test_a_resumed_simulation_ends_with_the_same_bits(recorder, outcome, last):
    server, _ = run_and_save(recorder, last)
    resumed = new_server()
    assert checkpointer(resumed, recorder).restore(recorder.saved("t")) == []
    assert (resumed.round, resumed.state_hash()) == (last, server.state_hash())
    assert resumed_outcome(recorder) == outcome


def test_resumed_again_and_again(recorder, outcome):
    """Each time, the checkpoint after a restored one writes the cohort alone."""
    for last in range(1, ROUNDS + 1):
        server = new_server()
        saver = checkpointer(server, recorder)
        if saved := recorder.saved("t"):
            saver.restore(saved)
        run_and_save(recorder, last, server, saver)
        content = recorder.saved("t")[0]["content"]
        if last == 2:
            written = [name for name, part in content["clients"].items() if part[0] == content["number"]]
            assert sorted(map(int, written)) == sorted(server.sample(2))
    assert server.state_hash() == outcome


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "emptied": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-3]),
    "flipped": flip,
    "nonsense": lambda path: path.write_bytes(os.urandom(path.stat().st_size)),
}


@pytest.mark.parametrize("damage", [*DAMAGES, "gone"])
@pytest.mark.parametrize("file", ["manifest", "segment"])
def test_the_older_one_is_used_if_the_newest_is_damaged(recorder, folder, outcome, file, damage):
    run_and_save(recorder, 4)
    newest = max(folder.glob(f"{file}-*"))
    newest.unlink() if damage == "gone" else DAMAGES[damage](newest)
    server = new_server()
    notes = checkpointer(server, recorder).restore(recorder.saved("t"))
    assert server.round == 3
    if (file, damage) == ("manifest", "gone"):
        assert notes == []
    else:
        (note,) = notes
        assert note.startswith("checkpoint 4 of t is damaged: ")
        assert note.endswith("; continues from checkpoint 3, after round 3")
        assert [(event.event, event.detail) for event in server.fleet.events] == [("checkpoint damaged", note)]
    kept, found = verified(recorder.saved("t"), recorder, "t", "c", PLAN, PEOPLE)
    assert (kept[0]["number"], found) == (3, notes)
    assert resumed_outcome(recorder) == outcome


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", ["manifest", "segment"])
def test_nothing_is_used_and_nothing_overwritten_if_both_are_damaged(recorder, folder, file, damage):
    run_and_save(recorder, 4)
    for path in folder.glob(f"{file}-*"):
        DAMAGES[damage](path)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    saved = recorder.saved("t")
    message = r"^checkpoint 4 of t is damaged: .*; checkpoint 3 of t is damaged: .*; start anew with resume=false$"
    with pytest.raises(UsageError, match=message):
        checkpointer(new_server(), recorder).restore(saved)
    with pytest.raises(UsageError, match=message):
        verified(saved, recorder, "t", "c", PLAN, PEOPLE)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def forged(folder, change):
    """Change the content of all manifests, whose checksums are right again."""
    for path in folder.glob("manifest-*"):
        content = json.loads(path.read_text())["content"]
        change(content)
        path.write_bytes(checkpoints._encoded(content))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(round=-5), "its round is -5, expected 0 to 9"),
        (lambda c: c.update(round=99), "its round is 99, expected 0 to 9"),
        (lambda c: c.update(trial="u"), "belongs to trial u"),
        (lambda c: c.update(configuration="d"), "belongs to another configuration"),
        (lambda c: c["clients"].pop(min(c["clients"])), "the states of 1 clients are missing"),
        (lambda c: c["clients"].update({"99": c["server"]}), "states of 1 clients too many, such as client 99"),
    ],
)
def test_forged_manifests_are_refused(recorder, folder, change, message):
    run_and_save(recorder, 3)
    forged(folder, change)
    with pytest.raises(UsageError, match=message):
        checkpointer(new_server(), recorder).restore(recorder.saved("t"))


def test_the_state_of_another_algorithm_is_refused(recorder):
    run_and_save(recorder, 2)
    server = new_server()
    server.state |= {"momentum": torch.zeros(1)}
    with pytest.raises(UsageError, match="checkpoint 2 of t belongs to another algorithm"):
        checkpointer(server, recorder).restore(recorder.saved("t"))


def test_a_part_that_is_no_state_is_refused(recorder, folder):
    """A pickle is not executed, whatever its checksum says."""
    run_and_save(recorder, 1)
    (path,) = folder.glob("segment-*")
    code = b"cos\nsystem\n(S'touch executed'\ntR."
    path.write_bytes(code)
    forged(
        folder,
        lambda c: c.update(server=[1, 0, len(code), checkpoints.checksum(code)], clients={}, segments={"1": len(code)}),
    )
    with pytest.raises(UsageError, match="missing"):
        checkpointer(new_server(), recorder).restore(recorder.saved("t"))
    parts = {"server": checkpoints.Part(1, 0, len(code), checkpoints.checksum(code))}
    read = checkpoint._parts_reader(recorder, "t")
    with pytest.raises(checkpoint._Unusable, match="part server cannot be read"):
        list(checkpoint._states(read(parts), torch.device("cpu")))


OPERATIONS = ("stage", "write", "finish", "read", "delete", "sync")


def dying_at(number):
    """Make this process die by SIGKILL before the storage operation of that number, or halfway through a write."""
    count = 0

    def counted(cls, name):
        original = getattr(cls, name)

        def operation(self, *arguments):
            nonlocal count
            count += 1
            if count == number:
                if name == "write" and isinstance(self, storage.Staged):
                    self.file.write(bytes(arguments[0])[: len(arguments[0]) // 2])
                    self.file.flush()
                os.kill(os.getpid(), signal.SIGKILL)
            return original(self, *arguments)

        setattr(cls, name, operation)

    for name in ("stage", "read", "delete", "sync"):
        counted(storage.Storage, name)
    for name in ("write", "finish"):
        counted(storage.Staged, name)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_before_any_operation_on_the_disk(tmp_path, outcome):
    """In a child process, in rounds 1 to 4; what the kill leaves is resumed to the same end."""
    killed = number = 0
    while True:
        number += 1
        recorder = CheckpointRecorder(str(tmp_path / str(number)), "e")
        child = os.fork()
        if child == 0:
            dying_at(number)
            run_and_save(recorder, 4)
            os._exit(0)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
            break
        killed += 1
        recorder = CheckpointRecorder(str(tmp_path / str(number)), "e")
        saved = recorder.saved("t")
        assert not any("fault" in one for one in saved)
        server = new_server()
        saver = checkpointer(server, recorder)
        if saved:
            assert saver.restore(saved) == []
        run_and_save(recorder, None, server, saver)
        assert server.state_hash() == outcome
        files = list((tmp_path / str(number) / "e/checkpoints/t").iterdir())
        assert not [path for path in files if path.name.startswith(".")]
    assert killed > 20


class Many(ClientStates):
    """States that are made when they are read; `most` of them were alive at once."""

    def __init__(self, clients, floats):
        self._clients, self._floats, self._alive, self.most, self.reads = clients, floats, [], 0, 0

    def __iter__(self):
        return iter(map(ClientIndex, range(self._clients)))

    def __len__(self):
        return self._clients

    def version(self, client):
        return 1

    def __getitem__(self, client):
        return self.watched({"w": torch.full((self._floats,), float(client))})

    def watched(self, state):
        self.reads += 1
        self._alive = [ref for ref in self._alive if ref() is not None] + [weakref.ref(state["w"])]
        self.most = max(self.most, len(self._alive))
        return state


@pytest.mark.parametrize(("clients", "floats", "block"), [(10_000, 200, 2**20), (5, 200_000, 2**18)])
def test_one_client_at_a_time_is_in_memory(recorder, monkeypatch, clients, floats, block):
    """In the second case, a state is larger than a block."""
    monkeypatch.setattr(checkpoint, "BLOCK_BYTES", block)
    states, sent, received = Many(clients, floats), [], []
    fleet = SimpleNamespace(states=states, events=[])
    server = SimpleNamespace(state={"w": torch.zeros(3)}, round=1, fleet=fleet, progress=dict)
    append, saved_bytes = recorder.append_to_checkpoint, recorder.saved_bytes
    monkeypatch.setattr(recorder, "append_to_checkpoint", lambda t, b: (sent.append(len(b)), append(t, b)))
    checkpointer(server, recorder).save()
    assert states.reads == clients
    assert states.most <= 2
    assert max(sent) <= block
    assert len(sent) <= 2 * (sum(sent) // block + 1) + clients * (floats * 4 > block)

    def counted(*arguments):
        content = saved_bytes(*arguments)
        received.append(len(content))
        return content

    monkeypatch.setattr(recorder, "saved_bytes", counted)
    content = recorder.saved("t")[0]["content"]
    parts = {name: checkpoints.Part(*part) for name, part in content["clients"].items()}
    loaded = Many(clients, floats)
    read = checkpoint._states(checkpoint._parts_reader(recorder, "t")(parts), torch.device("cpu"))
    for name, state in read:
        assert loaded.watched(state)["w"][0] == float(name)
        del state
    assert loaded.most <= 2
    assert max(received) <= block


def test_of_a_block_that_many_parts_share_each_is_copied_alone():
    """Copies of all that follows would take minutes for the blocks of many small states."""
    size, count = 2**12, 256
    blob = os.urandom(size * count)
    places = {str(n): (1, n * size, size, checkpoints.checksum(blob[n * size :][:size])) for n in range(count)}
    files = SimpleNamespace(saved_bytes=lambda trial, segment, offset, length: blob[offset : offset + length])
    read = checkpoint._parts_reader(files, "t")({name: checkpoints.Part(*place) for name, place in places.items()})
    tracemalloc.start()
    try:
        assert sum(len(content) for _, content in read) == len(blob)
        assert tracemalloc.get_traced_memory()[1] < len(blob) / 4
    finally:
        tracemalloc.stop()


def test_a_failed_save_is_made_up_for_by_the_next(recorder, monkeypatch, outcome):
    """The clients that changed before the failure are written again."""
    server = new_server()
    saver = checkpointer(server, recorder)
    write = storage.Staged.write

    def full(self, content):
        raise OSError(28, "No space left on device")

    for record in server.run():
        if record.round in (3, 4):
            with monkeypatch.context() as patch:
                patch.setattr(storage.Staged, "write", full)
                with pytest.raises(StorageError, match="No space left on device"):
                    saver.save()
            assert recorder.saved("t")[0]["content"]["round"] == 2
        else:
            saver.save()
        if record.round == 6:
            break
    assert write is storage.Staged.write
    assert resumed_outcome(recorder) == outcome


@pytest.mark.parametrize("method", ["append_to_checkpoint", "commit_checkpoint"])
def test_a_recorder_that_is_started_again_gets_the_whole_checkpoint(tmp_path, monkeypatch, outcome, method):
    """The blocks that the one before had are lost with it."""
    recorder = CheckpointRecorder(str(tmp_path), "e")
    server, saver = run_and_save(recorder, 2)
    original, calls = getattr(recorder, method), []

    def restarted(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            recorder._checkpoints = {}  # as a new recorder
        return original(*arguments)

    monkeypatch.setattr(recorder, method, restarted)
    run_and_save(recorder, 3, server, saver)
    assert len(calls) == 2
    newest = recorder.saved("t")[0]["content"]
    assert newest["round"] == 3
    assert {int(name) for name, part in newest["clients"].items() if part[0] == newest["number"]} >= set(
        server.sample(3)
    )
    monkeypatch.undo()
    assert resumed_outcome(recorder) == outcome


def test_a_view_is_saved_without_what_it_is_a_view_of(recorder):
    large = torch.zeros(1_000_000)
    state = {"row": large[:3], "turned": torch.arange(6.0).reshape(2, 3).t(), "one": torch.ones(()).expand(4)}
    fleet = SimpleNamespace(states=Many(0, 0), events=[])
    server = SimpleNamespace(state=state, round=1, fleet=fleet, progress=dict)
    checkpointer(server, recorder).save()
    content = recorder.saved("t")[0]["content"]
    assert content["server"][2] < 10_000
    read = checkpoint._parts_reader(recorder, "t")({"server": checkpoints.Part(*content["server"])})
    ((_, again),) = checkpoint._states(read, torch.device("cpu"))
    assert all(torch.equal(again[name], state[name]) for name in state)
