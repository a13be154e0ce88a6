"""Makes the jobs of docs/performance.md, and runs rayfed's plan for a job. This needs rayfed's own environment."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from _users import EXAMPLES, FEATURES, make_user
from growth import make_clients
from many_clients import draw_images

from peers.job import CIFAR_CNN, WORDS, Job, network
from rayfed.data.loading import load
from rayfed.data.population import Client, ClientTable, Examples, Population, TestSet
from rayfed.experiments.config import Config
from rayfed.experiments.given import Given
from rayfed.experiments.plan import Plan, make_plan

TEST_IMAGES = 10_000
MNIST_CNN = "mnist-cnn"
MANY_CLIENTS = "many-clients"
MANY_USERS = "many-users"
LARGE_MODEL = "large-model"
PIXELS = "pixels"
NEXT_WORDS = "next-words"
CIFAR10 = "cifar10"


def mnist_cnn(root: Path, rounds: int, *, share: float = 1.0, channels_last: bool = True) -> Job:
    """Return the job of `round_seconds.py`: 20 clients of the published MNIST split, with the four-layer CNN.

    Args:
        root: The folder with MNIST/raw and partitions/.
        rounds: The number of rounds, with the first, which warms up.
        share: The share of each client's training images to keep; at least one batch stays.
        channels_last: The memory format of the bare loop and of the other libraries.
    """
    file = root / "partitions" / "mnist_dir0.1_20clients.parquet"
    population = load("mnist", {"root": str(root)}, "file", {"file": str(file), "validation": 0})

    def part(examples: Examples) -> tuple[np.ndarray, np.ndarray]:
        kept = max(min(10, len(examples)), int(len(examples) * share))
        return np.asarray(examples.x[:kept]), examples.y[:kept]

    train = [part(client.train) for client in population.clients]
    test = [(np.asarray(client.test.x[::2]), client.test.y[::2]) for client in population.clients]
    return _with_initial_weights(
        name=MNIST_CNN,
        network="cnn",
        x=np.concatenate([x for x, _ in train]),
        y=np.concatenate([y for _, y in train]),
        sizes=np.array([len(y) for _, y in train]),
        test_x=np.concatenate([x for x, _ in test]),
        test_y=np.concatenate([y for _, y in test]),
        mean=float(population.mean[0]),
        std=float(population.std[0]),
        rounds=rounds,
        channels_last=channels_last,
    )


def many_clients(rounds: int, *, clients: int = 500, images: int = 100, name: str = MANY_CLIENTS, **others: Any) -> Job:
    """Return the job of `many_clients.py`: `clients` clients of `images` images each, with an MLP."""
    total = clients * images
    x, y = draw_images(total + TEST_IMAGES)
    return _with_initial_weights(
        name=name,
        network="mlp",
        x=x[:total],
        y=y[:total],
        sizes=np.full(clients, images),
        test_x=x[total:],
        test_y=y[total:],
        mean=0.0,
        std=1.0,
        rounds=rounds,
        channels_last=False,
        **others,
    )


def pixels(rounds: int) -> Job:
    """Return a job of ten clients with 140 images each of `mini_scans`, whose strokes a small U-Net finds."""
    scans = load("mini_scans", {}, "domains", {"validation": 0})
    train, test = ([getattr(client, name) for client in scans.clients] for name in ("train", "test"))
    x, y = (np.concatenate([getattr(part, name)[:280] for part in train]) for name in ("x", "y"))
    return _with_initial_weights(
        name=PIXELS,
        network="unet",
        x=x,
        y=y,
        sizes=np.full(10, 140),
        test_x=np.concatenate([part.x for part in test]),
        test_y=np.concatenate([part.y for part in test]),
        mean=0.5,
        std=0.5,
        lr=0.02,
        width=8,
        rounds=rounds,
        channels_last=True,
    )


def next_words(rounds: int) -> Job:
    """Return a job of 20 clients with 100 sentences each of 21 words, of which each has five likely successors."""
    rng = np.random.default_rng(0)
    successors = rng.integers(0, WORDS, (WORDS, 5))
    words = np.empty((2500, 21), np.int64)
    words[:, 0] = rng.integers(0, WORDS, len(words))
    for position in range(1, 21):
        likely = successors[words[:, position - 1], rng.integers(0, 5, len(words))]
        words[:, position] = np.where(rng.random(len(words)) < 0.9, likely, rng.integers(0, WORDS, len(words)))
    x, y = words[:, :-1], words[:, 1:]
    return _with_initial_weights(
        name=NEXT_WORDS,
        network="gru",
        x=x[:2000],
        y=y[:2000],
        sizes=np.full(20, 100),
        test_x=x[2000:],
        test_y=y[2000:],
        mean=0.0,
        std=1.0,
        lr=0.5,
        width=64,
        rounds=rounds,
        channels_last=False,
    )


def cifar10(cycles: int, *, users: int = 1000, cohort: int = 50, every: int = 10) -> Job:
    """Return the job by which engines compare their speed: pfl-research's CIFAR-10, on noise, in cycles of ten rounds.

    Of 1,000 users with 50 images each, 50 take part in a round. The model is evaluated on 10,000 images in the last
    round of a cycle.
    """
    rng = np.random.default_rng(0)
    total = users * 50
    x = rng.integers(0, 256, (total + TEST_IMAGES, 3, 32, 32), dtype=np.uint8)
    y = rng.integers(0, 10, len(x))
    return _with_initial_weights(
        name=CIFAR10,
        network=CIFAR_CNN,
        x=x[:total],
        y=y[:total],
        sizes=np.full(users, 50),
        test_x=x[total:],
        test_y=y[total:],
        mean=0.5,
        std=0.25,
        lr=0.1,
        rounds=every * cycles,
        channels_last=True,
        cohort=cohort,
        evaluate_every=every,
    )


def large_model(rounds: int, *, parameters: int) -> Job:
    """Return a job of 10 clients of 50 images each, with an MLP of about `parameters` parameters."""
    inputs, classes = 784, 10  # with two hidden layers of w units, w² + (inputs + classes + 2) w parameters and a few
    half = (inputs + classes + 2) / 2
    width = max(1, round(math.sqrt(half**2 + parameters) - half))
    return many_clients(rounds, clients=10, images=50, name=LARGE_MODEL, width=width, watched=True)


def many_users(rounds: int, *, users: int, cohort: int = 100) -> Job:
    """Return a job of `users` users of 10 examples, 8 of them for training, as in `growth.py`, with an MLP."""
    tests = [make_user(users + number)["test"] for number in range(1000)]
    return _with_initial_weights(
        name=f"{MANY_USERS}-{users}",
        network="mlp",
        x=np.empty((0, FEATURES), np.float32),
        y=np.empty(0, np.int64),
        sizes=np.full(users, EXAMPLES - 2),
        test_x=np.concatenate([x for x, _ in tests]),
        test_y=np.concatenate([y for _, y in tests]),
        mean=0.0,
        std=1 / 255,  # leaves inputs as they are
        batch_size=EXAMPLES - 2,
        rounds=rounds,
        channels_last=False,
        cohort=min(users, cohort),
        watched=True,
    )


def _with_initial_weights(**values: Any) -> Job:
    """Return the job with the initial weights that rayfed draws from its seed."""
    job = Job(**{"lr": 0.005, "batch_size": 10, "initial": []} | values)
    model = plan_of(job, hosts=0, results="results").blueprint.model
    return replace(job, initial=[p.detach().numpy() for p in model.parameters()])


def plan_of(job: Job, *, hosts: int, results: str) -> Plan:
    """Return rayfed's plan for `job` on `hosts` Ray actors, with the tables in the folder `results`."""
    own = job.network in ("unet", "gru", CIFAR_CNN)  # which rayfed has not, or otherwise
    hidden = {"hidden": [job.width] * 2} if job.network == "mlp" else {}
    values: dict[str, Any] = {
        "model": {} if own else {"name": job.network} | hidden,
        "local": {"batch_size": job.batch_size, "epochs": 1, "lr": job.lr},
        "rounds": job.rounds,
        "cohort": job.cohort or None,
        "evaluate.every": job.evaluate_every or job.rounds,
        "evaluate.splits": ["val"],  # which no job has
        "seed": job.seed,
        "placement.hosts": hosts,
        "results": results,
    }
    if job.gpu:
        values |= {"placement.gpus": 1, "placement.vmap_clients": job.participants, "local.drop_last": True}
    config = Config.read(values)
    if job.makes_users:
        return make_plan(config, Given(clients=make_clients(len(job.sizes)), num_classes=10))
    model = partial(network, job.network, 0, job.width) if own else None
    return make_plan(config, Given(model=model), population=population_of(job))


def population_of(job: Job) -> Population:
    """Return the clients of `job`, without test images; the server has some where the model is evaluated."""
    empty = Examples(job.x[:0], job.y[:0])
    parts = [job.rows(client) for client in range(len(job.sizes))]
    clients = [Client(i, "all", Examples(job.x[rows], job.y[rows]), empty, empty) for i, rows in enumerate(parts)]
    classes = {"unet": 2, "gru": WORDS}.get(job.network, 10)
    tests: tuple[TestSet, ...] = ()
    if job.evaluate_every:
        tests = (TestSet("all", "test", Examples(job.test_x, job.test_y)),)
    channels = job.x.shape[1] if job.x.ndim == 4 else 1
    mean, std = (job.mean,) * channels, (job.std,) * channels
    return Population(job.name, ClientTable.of(clients), classes, job.x.shape[1:], mean, std, tests)
