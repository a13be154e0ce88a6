"""Saving and restoring a simulation: only what changed is written, and any damage is noticed."""

import itertools
import json
import os
import signal
import weakref
from types import SimpleNamespace

import pytest
import torch

from helpers.checkpoints import CheckpointRecorder
from helpers.federations import blobs, blueprint, new_server
from rayfed.algorithms.scaffold import Scaffold
from rayfed.core.errors import StorageError, UsageError
from rayfed.core.ids import ClientIndex
from rayfed.engine import checkpoint
from rayfed.engine.checkpoint import Checkpointer, verified
from rayfed.engine.client_store import ClientStates
from rayfed.records import checkpoint_store, storage

ROUNDS, COHORT, CLIENTS = 9, 3, 12
PEOPLE = blobs(CLIENTS, sizes=(12, 15))
PLAN = blueprint(Scaffold(), PEOPLE, rounds=ROUNDS, cohort=COHORT)


def server_of(plan=PLAN):
    return new_server(plan, PEOPLE, points=())


def checkpointer(server, recorder, configuration="c"):
    return Checkpointer(server, recorder, "t", configuration, "0")


@pytest.fixture(scope="module")
def outcome():
    server = server_of()
    list(server.run())
    return server.state_hash()


@pytest.fixture
def recorder(tmp_path):
    return CheckpointRecorder(str(tmp_path), "e")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "e/checkpoints/t"


def run_and_save(recorder, last, server=None, saver=None):
    server = server or server_of()
    saver = saver or checkpointer(server, recorder)
    for record in server.run():
        saver.save()
        if record.round == last:
            break
    return server, saver


def go_on(recorder, last=None):
    """Run from the newest checkpoint, if there is one, to the round `last`, and return the server."""
    server = server_of()
    saver = checkpointer(server, recorder)
    if saved := recorder.saved("t"):
        saver.restore(saved)
    run_and_save(recorder, last, server, saver)
    return server


def test_each_checkpoint_writes_the_server_and_the_cohort_alone(recorder, folder):
    server, saver = server_of(), None
    seen = set()
    for record in server.run():
        saver = saver or checkpointer(server, recorder)
        saver.save()
        newest = recorder.saved("t")[0]["content"]
        cohort, seen = set(server.sample(record.round)), seen | set(server.sample(record.round))
        assert {int(name) for name in newest["clients"]} == seen
        written = {path.name for path in folder.glob(f"*-{newest['number']:06d}.*")}
        states = {f"{client}-{newest['number']:06d}.pt" for client in cohort}
        assert written == states | {f"server-{newest['number']:06d}.pt", f"manifest-{newest['number']:06d}.json"}
        assert len(list(folder.iterdir())) <= 2 * (len(seen) + 2)
    assert len(list(folder.glob("manifest-*"))) == 2


def test_a_simulation_that_is_resumed_again_and_again_ends_with_the_same_bits(recorder, outcome):
    """Each time, the checkpoint after a restored one writes the cohort alone."""
    for last in range(1, ROUNDS + 1):
        server, resumed = go_on(recorder, last), server_of()
        assert checkpointer(resumed, recorder).restore(recorder.saved("t")) == []
        assert (resumed.round, resumed.state_hash()) == (last, server.state_hash())
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
@pytest.mark.parametrize("file", ["manifest", "server", "[0-9]*"])
def test_the_older_one_is_used_if_the_newest_is_damaged(recorder, folder, outcome, file, damage):
    run_and_save(recorder, 4)
    newest = max(folder.glob(f"{file}-000004.*"))
    newest.unlink() if damage == "gone" else DAMAGES[damage](newest)
    server = server_of()
    notes = checkpointer(server, recorder).restore(recorder.saved("t"))
    assert server.round == 3
    if (file, damage) == ("manifest", "gone"):
        assert notes == []
    else:
        (note,) = notes
        assert note.startswith("checkpoint 4 of t is damaged: ")
        assert note.endswith("; continues from checkpoint 3, after round 3")
    kept, found = verified(recorder.saved("t"), recorder, "t", "c", PLAN)
    assert (kept[0]["number"], found) == (3, notes)
    assert go_on(recorder).state_hash() == outcome


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", ["manifest", "server"])
def test_nothing_is_used_and_nothing_overwritten_if_both_are_damaged(recorder, folder, file, damage):
    run_and_save(recorder, 4)
    for path in folder.glob(f"{file}-*"):
        DAMAGES[damage](path)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    saved = recorder.saved("t")
    message = r"^checkpoint 4 of t is damaged: .*; checkpoint 3 of t is damaged: .*; start anew with resume=false$"
    with pytest.raises(UsageError, match=message):
        checkpointer(server_of(), recorder).restore(saved)
    with pytest.raises(UsageError, match=message):
        verified(saved, recorder, "t", "c", PLAN)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def forged(folder, change):
    """Change the content of all manifests, whose checksums are right again."""
    for path in folder.glob("manifest-*"):
        content = json.loads(path.read_text())["content"]
        change(content)
        path.write_bytes(checkpoint_store._encoded(content))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(round=-5), "its round is -5, expected 0 to 9"),
        (lambda c: c.update(round=99), "its round is 99, expected 0 to 9"),
        (lambda c: c.update(trial="u"), "belongs to trial u"),
        (lambda c: c.update(configuration="d"), "belongs to another configuration"),
    ],
)
def test_forged_manifests_are_refused(recorder, folder, change, message):
    run_and_save(recorder, 3)
    forged(folder, change)
    with pytest.raises(UsageError, match=message):
        checkpointer(server_of(), recorder).restore(recorder.saved("t"))


def test_the_state_of_another_algorithm_is_refused(recorder):
    run_and_save(recorder, 2)
    server = server_of()
    server.state |= {"momentum": torch.zeros(1)}
    with pytest.raises(UsageError, match="checkpoint 2 of t belongs to another algorithm"):
        checkpointer(server, recorder).restore(recorder.saved("t"))


def test_a_file_that_is_no_state_is_refused(recorder, folder):
    """A pickle is not executed, whatever its checksum says."""
    run_and_save(recorder, 1)
    code = b"cos\nsystem\n(S'touch executed'\ntR."
    (folder / "server-000001.pt").write_bytes(code)
    forged(folder, lambda c: c.update(server=[1, len(code), checkpoint_store.checksum(code)]))
    with pytest.raises(UsageError, match="state server cannot be read"):
        checkpointer(server_of(), recorder).restore(recorder.saved("t"))


def dying_at(number):
    """Make this process die by SIGKILL before the storage operation of that number, or halfway through a write."""
    count = 0

    def counted(cls, name):
        original = getattr(cls, name)

        def operation(self, *arguments):
            nonlocal count
            count += 1
            if count == number:
                if name == "write":
                    self.local.mkdir(parents=True, exist_ok=True)
                    half = bytes(arguments[1])[: len(arguments[1]) // 2]
                    (self.local / f".{arguments[0]}.unfinished").write_bytes(half)
                os.kill(os.getpid(), signal.SIGKILL)
            return original(self, *arguments)

        setattr(cls, name, operation)

    for name in ("write", "read", "delete", "sync"):
        counted(storage.Storage, name)
    counted(os, "replace")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.slow
def test_killed_before_any_operation_on_the_disk(tmp_path):
    """In a child process, in rounds 1 to 3 of 4; what the kill leaves is resumed to the same end."""
    plan = blueprint(Scaffold(), PEOPLE, rounds=4, cohort=2)
    undisturbed = server_of(plan)
    list(undisturbed.run())
    outcome, killed = undisturbed.state_hash(), 0
    for number in itertools.count(1):
        recorder = CheckpointRecorder(str(tmp_path / str(number)), "e")
        child = os.fork()
        if child == 0:
            dying_at(number)
            run_and_save(recorder, 3, server_of(plan))
            os._exit(0)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
            break
        killed += 1
        recorder = CheckpointRecorder(str(tmp_path / str(number)), "e")
        saved = recorder.saved("t")
        assert not any("fault" in one for one in saved)
        server = server_of(plan)
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
        self._floats, self._alive, self.most, self.reads = floats, [], 0, 0
        self.versions = dict.fromkeys(map(ClientIndex, range(clients)), 1)

    def __getitem__(self, client):
        return self.watched({"w": torch.full((self._floats,), float(client))})

    def watched(self, state):
        self.reads += 1
        self._alive = [ref for ref in self._alive if ref() is not None] + [weakref.ref(state["w"])]
        self.most = max(self.most, len(self._alive))
        return state


@pytest.mark.parametrize(("clients", "floats", "block"), [(3000, 200, 2**20), (5, 200_000, 2**18)])
def test_no_more_than_a_block_is_in_memory(recorder, monkeypatch, clients, floats, block):
    """In the second case, a state is larger than a block."""
    monkeypatch.setattr(checkpoint, "BLOCK_BYTES", block)
    states, sent, received = Many(clients, floats), [], []
    fleet = SimpleNamespace(states=states, events=[])
    rounds = SimpleNamespace(ring={})
    server = SimpleNamespace(state={"w": torch.zeros(3)}, round=1, fleet=fleet, progress=dict, rounds=rounds)
    write, read = recorder.write_states, recorder.saved_states

    def written(trial, number, contents):
        sent.append(sum(map(len, contents.values())))
        write(trial, number, contents)

    def counted(*arguments):
        contents = read(*arguments)
        received.append(sum(map(len, contents.values())))
        return contents

    monkeypatch.setattr(recorder, "write_states", written)
    monkeypatch.setattr(recorder, "saved_states", counted)
    checkpointer(server, recorder).save()
    assert states.reads == clients
    assert states.most <= 2
    content = recorder.saved("t")[0]["content"]
    parts = content["clients"]
    loaded = Many(clients, floats)
    for name, state in checkpoint._states(checkpoint._contents(recorder, "t", parts), torch.device("cpu")):
        assert loaded.watched(state)["w"][0] == float(name)
        del state
    assert loaded.most <= 2
    for sizes in (sent, received):
        assert max(sizes) <= max(block, floats * 4 + 2000)
        assert len(sizes) <= 2 * (sum(sizes) // block + 1) + clients * (floats * 4 > block)


def test_a_failed_save_is_made_up_for_by_the_next(recorder, monkeypatch, outcome):
    """The clients that changed before the failure are written again."""
    server = server_of()
    saver = checkpointer(server, recorder)

    def full(self, name, content):
        raise OSError(28, "No space left on device")

    for record in server.run():
        if record.round in (3, 4):
            with monkeypatch.context() as patch:
                patch.setattr(storage.Storage, "write", full)
                with pytest.raises(StorageError, match="No space left on device"):
                    saver.save()
            assert recorder.saved("t")[0]["content"]["round"] == 2
        else:
            saver.save()
        if record.round == 6:
            break
    assert go_on(recorder).state_hash() == outcome
