"""Examples that stay in a file or in memory train and score bit for bit as those on the device."""

import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from helpers.federations import blobs, blueprint, net, new_server, on_pictures, with_inputs
from helpers.ray_session import start_ray
from rayfed.algorithms.dbe import DBE
from rayfed.algorithms.fedavg import FedAvg
from rayfed.augment.base import Noise
from rayfed.core.errors import UsageError
from rayfed.data.on_disk import ArrayFile, LazyRows, as_lazy_rows, memory_mapped
from rayfed.data.population import ClientTable, Examples, PooledExamples
from rayfed.engine import device_data
from rayfed.engine.device_data import HostData, Normalise, Part, Streamed, room_for
from rayfed.engine.host import LocalFleet
from rayfed.engine.training import Pool


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYFED_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def on_disk(population):
    """The same people with all their inputs in one file, in another order."""
    parts = population.examples()
    whole = np.concatenate([part.x for part in parts])
    order = np.random.default_rng(0).permutation(len(whole))
    place = np.argsort(order)

    def fill(array):
        array[...] = whole[order]

    rows, at = as_lazy_rows(memory_mapped("people", {"version": 1}, whole.shape, whole.dtype, fill)), 0

    def moved(x):
        nonlocal at
        at += len(x)
        return rows.select(place[at - len(x) : at])

    return with_inputs(population, moved)


def pooled(population):
    """The same people with their examples in one array, in another order of the clients."""
    order = [2, 0, 3, 1]
    parts = [part for client in order for part in population.clients[client].parts]
    source = PooledExamples(Examples.joined(parts), np.cumsum([0, *map(len, parts)]))
    table = population.clients
    clients = ClientTable(source, table.sizes, table.domains, table.ids, numbers=np.argsort(order))
    return replace(population, clients=clients)


def as_pixels(population):
    """The same people as uint8 images [3, 4, 4]."""

    def pixels(x):
        x = np.tile(x.reshape(-1, 1, 2, 3), (1, 3, 2, 2))[:, :, :, :4]
        return (x * 40 + 128).clip(0, 255).astype(np.uint8)

    return with_inputs(population, pixels, shape=(3, 4, 4), mean=(0.5,) * 3, std=(0.5,) * 3)


def convolutional():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 8))
    model = on_pictures(net())
    model.body = layers
    return model


FORMS = {"floats": (lambda people: people, net), "pixels": (as_pixels, convolutional)}
CASES = {
    "plain": {},
    "augmented": {"augment": Noise()},
    "vectorised": {"vmap_clients": 2},
    "ragged": {"drop_last": False, "batch_size": 6},
    "dbe": {"algorithm": DBE()},
}


def outcome(plan, people):
    points = (plan.algorithm.traits.default_eval_point, "trained", "adapted")
    server = new_server(plan, people, points=points, splits=("train", "val", "test"))
    scores = [sorted(record.scores) for record in server.run()]
    return server.state_hash(), scores


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", FORMS)
def test_where_inputs_lie_changes_no_bit(case, form):
    make, model = FORMS[form]
    people, changes = make(blobs(4)), {"algorithm": FedAvg(), **CASES[case]}
    plan = blueprint(changes.pop("algorithm"), people, model=model(), **changes)
    expected = outcome(replace(plan, data_on_device=True), people)
    assert outcome(replace(plan, data_on_device=False), people) == expected
    for data_on_device in (True, False):
        assert outcome(replace(plan, data_on_device=data_on_device), on_disk(people)) == expected
        assert outcome(replace(plan, data_on_device=data_on_device), pooled(people)) == expected


def test_batches_of_a_block_are_taken_from_the_array_of_all_clients():
    people = pooled(as_pixels(blobs(4)))
    task = blueprint(FedAvg(), people, model=convolutional()).context(people, "cpu").task
    data = HostData(people, task, held_out_share=0, seed=0)
    parts = [data.parts(client)["train"] for client in (3, 1)]
    pool = Pool(parts)
    array = people.clients.source.pool.x
    assert pool._x.data_ptr() == array.ctypes.data
    rows = [[np.array([4, 0]), np.array([2, 3])], [np.array([1, 5])]]
    x, y = next(pool.batches(rows, [0, 1], [None, None]))
    for i, part in enumerate(parts):
        own = part.take(torch.from_numpy(rows[i][0]))
        assert torch.equal(x[i], own.x)
        assert torch.equal(y[i], own.y)


def test_the_array_of_all_clients_goes_to_the_device_if_it_fits():
    people = pooled(as_pixels(blobs(4)))
    task = blueprint(FedAvg(), people, model=convolutional()).context(people, "cpu").task
    size = people.clients.source.pool.x.nbytes
    for room, fits in ((size, True), (size - 1, False)):
        data = HostData(people, task, held_out_share=0, seed=0, room=room)
        assert (data.parts(1)["val"].rows is not None) == fits
    held_out = HostData(people, task, held_out_share=0.2, seed=0)
    assert held_out.parts(1)["train"].rows is None


class TestPart:
    device = torch.device("cpu")

    def parts(self, x, source):
        normalise = Normalise(blobs(1), self.device, channels_last=False)
        y = np.arange(len(x))
        return [
            Part(Examples(x, y), self.device, normalise),
            Part(Examples(source, y), self.device, normalise, data_on_device=False),
        ]

    @pytest.mark.parametrize("dtype", ["uint8", "float32", "float64"])
    @pytest.mark.parametrize("kind", ["in memory", "in a file", "read-only", "every second"])
    def test_a_streamed_part_gives_the_same_batches(self, dtype, kind):
        x = np.random.default_rng(0).integers(0, 200, (23, 1, 2, 3)).astype(dtype)
        source = x
        if kind == "in a file":
            source = as_lazy_rows(memory_mapped("x", {}, x.shape, x.dtype, lambda array: np.copyto(array, x)))
        elif kind == "read-only":
            source = x.view()
            source.flags.writeable = False
        elif kind == "every second":
            source = np.repeat(x, 2, axis=0)[::2]
        resident, there = self.parts(x, source)
        rows = torch.tensor([20, 3, 4, 3, 0])
        assert isinstance(there.x, Streamed)
        for get in (
            lambda part: [part.take(rows)],
            lambda part: part.batches(7),
            lambda part: part.batches(2, rows),
            lambda part: [part.augmented(rows, Noise())],
        ):
            made = []
            for part in (resident, there):
                torch.manual_seed(0)
                made.append(list(get(part)))
            for one, other in zip(*made, strict=True):
                assert one.x.dtype == other.x.dtype
                assert torch.equal(one.x, other.x)
                assert torch.equal(one.y, other.y)

    def test_nothing_is_read_before_it_is_needed(self, monkeypatch):
        x = np.zeros((9, 4), np.float32)
        source = as_lazy_rows(memory_mapped("x", {}, x.shape, x.dtype, lambda array: None))
        seen = []
        read = ArrayFile.read
        monkeypatch.setattr(ArrayFile, "read", lambda self, rows, out: (seen.append(len(rows)), read(self, rows, out)))
        _, part = self.parts(x, source)
        assert seen == []
        part.take(torch.tensor([1, 2]))
        assert seen == [2]


def test_room(monkeypatch):
    monkeypatch.setattr(device_data, "memory_bytes", lambda: 800)
    assert room_for(True, "cpu") == math.inf
    assert room_for(False, "cpu") == 0
    assert room_for(None, "cpu") == 200
    assert room_for(None, "cpu", 1 / 2) == 100


def test_by_default_what_takes_more_than_a_quarter_of_the_memory_is_streamed(monkeypatch):
    people = on_disk(blobs(3))
    size = sum(part.x.nbytes for part in people.examples())
    for memory, held in ((4 * size, [0, 1, 2]), (4 * size - 4, [1, 2]), (size, [])):
        monkeypatch.setattr(device_data, "memory_bytes", lambda memory=memory: memory)
        data = LocalFleet(blueprint(FedAvg(), people), people).host.data
        first = [data.parts(client) for client in range(3)]
        kind = torch.Tensor if held else Streamed
        assert all(type(part.x) is kind for parts in first for part in parts.values())
        assert [client for client in (2, 1, 0) if data.parts(client) is first[client]][::-1] == (held or [0, 1, 2])


@pytest.mark.ray
class TestBetweenProcesses:
    """Hosts of this machine read the file by themselves; in a cluster, what is small travels as bytes."""

    @pytest.fixture(autouse=True)
    def fleet(self):
        from rayfed.distributed import ray_fleet

        start_ray()
        return ray_fleet

    def nodes(self, monkeypatch, address):
        monkeypatch.setattr("ray.nodes", lambda: [{"Alive": True, "NodeManagerAddress": address}])

    def test_a_session_of_this_machine_is_sent_paths(self, fleet, monkeypatch):
        self.nodes(monkeypatch, "127.0.0.1")
        people = on_disk(blobs(3))
        assert fleet.sendable(people) is people

    def test_a_cluster_is_sent_bytes_of_what_is_small_enough(self, fleet, monkeypatch):
        self.nodes(monkeypatch, "10.0.0.1")
        people = on_disk(blobs(3))
        assert not any(isinstance(part.x, LazyRows) for part in fleet.sendable(people).examples())
        monkeypatch.setattr(device_data, "memory_bytes", lambda: 100)
        assert fleet.sendable(people) is people

    @pytest.mark.parametrize("data_on_device", [True, False])
    def test_a_host_process_gets_the_same_bits_from_the_path(self, data_on_device):
        from rayfed.distributed.host_actor import HostMethods

        people = on_disk(blobs(3))
        plan = blueprint(FedAvg(), people, data_on_device=data_on_device)
        sent = pickle.loads(pickle.dumps(people))
        hosts = [HostMethods() for _ in range(2)]
        for host, some in zip(hosts, (people, sent), strict=True):
            host.take_up(plan, some, 0.0)
        kind = torch.Tensor if data_on_device else Streamed
        for client in range(3):
            one, other = (host.host.data.parts(client) for host in hosts)
            for name in one:
                assert type(other[name].x) is kind
                assert torch.equal(one[name].x[0 : len(one[name])], other[name].x[0 : len(one[name])])

    def test_a_host_without_the_file_says_so_when_it_is_asked_and_does_not_die(self, home):
        from rayfed.distributed.host_actor import HostMethods

        people = on_disk(blobs(3))
        sent = pickle.dumps(people)
        (path,) = home.glob("*/*.npy")
        path.unlink()
        plan, unpickled = blueprint(FedAvg(), people, data_on_device=True), pickle.loads(sent)
        with pytest.raises(UsageError, match="No such file or directory on this machine; set RAYFED_CACHE"):
            HostMethods().take_up(plan, unpickled, 0.0)
