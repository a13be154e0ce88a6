"""A job that every engine can run, and the outcome of a run: both are .npz files.

This module needs only NumPy and torch, so that it can be imported in the environment of any engine. It takes the order
of the batches from `rayfed.core.rng`, which needs no more than that. All engines therefore take the same steps, and end
with the same weights up to rounding.
"""

import argparse
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from _users import make_user
from torch import Tensor, nn

from rayfed.core.ids import Moment
from rayfed.core.rng import generator

CIFAR_CNN = "cifar_cnn"
WORDS = 200
"""The number of words of the job with sentences."""
PROCESSES = 2
"""The number of worker processes of every engine; each has one thread."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """FedAvg with one local epoch of plain SGD on full batches.

    Attributes:
        name: The name of the job.
        network: The name of the network in `network`, which is also rayfed's.
        x, y: The training images of all clients, uint8 [n, 1, 28, 28], and their labels, int64 [n]. Labels may be of
            pixels, and inputs words, int64 [n, length]. None where users are made from their number.
        sizes: The number of training images of each client, int64 [clients]; images of a client are adjacent.
        test_x, test_y: The images and labels on which the final models are compared.
        initial: The initial parameters, in the order of `network(...).parameters()`.
        mean, std: The normalisation of the images, (x / 255 - mean) / std.
        lr: The learning rate.
        batch_size: The number of examples of a batch.
        rounds: The number of rounds, with the first, which warms up.
        seed: The seed of the order of the batches.
        channels_last: Whether to use the memory format channels-last instead of PyTorch's default; rayfed always does.
        width: The number of units in each hidden layer of the MLP.
        cohort: How many clients each engine draws for a round, all of one size; 0: all clients take part.
        watched: Whether memory is sampled, which slows rounds down a little.
        evaluate_every: The rounds between evaluations of the model on the test images; 0: it is not evaluated.
        gpu: Whether models train on a GPU, which all processes of an engine share.
    """

    name: str
    network: str
    x: np.ndarray
    y: np.ndarray
    sizes: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray
    initial: list[np.ndarray]
    mean: float
    std: float
    lr: float
    batch_size: int
    rounds: int
    seed: int = 0
    channels_last: bool = True
    width: int = 200
    cohort: int = 0
    watched: bool = False
    evaluate_every: int = 0
    gpu: bool = False

    @property
    def makes_users(self) -> bool:
        """Whether users are made from their number; the examples of each are one batch."""
        return not len(self.x)

    @property
    def device(self) -> torch.device:
        """The device of models and batches."""
        return torch.device("cuda" if self.gpu else "cpu")

    @property
    def participants(self) -> int:
        """The number of clients of a round."""
        return self.cohort or len(self.sizes)

    @property
    def steps(self) -> int:
        """The number of gradient steps of all clients in one round."""
        of_clients = self.sizes // self.batch_size
        return self.cohort * int(of_clients[0]) if self.cohort else int(of_clients.sum())

    @cached_property
    def ends(self) -> np.ndarray:
        return np.cumsum(self.sizes)

    def rows(self, client: int) -> slice:
        """Return the rows of `x` and `y` that a client holds."""
        return slice(int(self.ends[client] - self.sizes[client]), int(self.ends[client]))

    def data(self, client: int) -> tuple[Tensor, Tensor]:
        """Return the normalised training images of a client, float32 [n, 1, 28, 28], and their labels [n]."""
        if self.makes_users:
            x, y = make_user(client)["train"]
            return torch.from_numpy(x).to(self.device), torch.from_numpy(y).to(self.device)
        rows = self.rows(client)
        return self.normalised(self.x[rows]).to(self.device), torch.from_numpy(self.y[rows]).to(self.device)

    def normalised(self, images: np.ndarray) -> Tensor:
        """Return (x / 255 - mean) / std, with the roundings of rayfed, which training would magnify; words stay."""
        if images.dtype == np.int64:
            return torch.from_numpy(images)
        mean, std = torch.tensor(self.mean), torch.tensor(self.std)
        x = torch.from_numpy(images).float().mul_(1 / (255 * std)).add_(-mean / std)
        return x.to(memory_format=self.memory_format)

    @property
    def memory_format(self) -> torch.memory_format:
        return torch.channels_last if self.channels_last else torch.contiguous_format

    def batches(self, client: int, round: int) -> Tensor:
        """Return the example numbers of every batch of a client in a round, counted from 1: int64 [steps, B]."""
        if self.makes_users:  # the only batch has all examples, whose order does not matter
            return torch.arange(self.batch_size)[None]
        return self._batches[round - 1][client]

    @cached_property
    def _batches(self) -> list[list[Tensor]]:
        """The batches of all rounds and clients.

        They are drawn before the first round ends, so that the keyed streams, of which rayfed opens one per client and
        round, cost the other libraries nothing in the rounds that are timed.
        """
        return [
            [self._drawn(client, round) for client in range(len(self.sizes))] for round in range(1, self.rounds + 1)
        ]

    def _drawn(self, client: int, round: int) -> Tensor:
        examples = int(self.sizes[client])
        rng = generator(self.seed, "batches", Moment("round", round), phase=0, client=client)
        steps = examples // self.batch_size
        return torch.from_numpy(rng.permutation(examples)[: steps * self.batch_size]).view(steps, self.batch_size)

    def model(self) -> nn.Module:
        """Return the network with the initial parameters."""
        model = network(self.network, math.prod(self.test_x.shape[1:]), self.width)
        set_parameters(model, self.initial)
        model = model.to(memory_format=self.memory_format)  # type: ignore[call-overload]
        return model.to(self.device)

    def is_evaluated(self, round: int) -> bool:
        """Return whether the model is evaluated after `round`, counted from 1."""
        return self.evaluate_every > 0 and round % self.evaluate_every == 0

    def accuracy(self, parameters: Sequence[np.ndarray]) -> float:
        """Return the share of the test images that the model with `parameters` classifies correctly."""
        model = self.model()
        set_parameters(model, parameters)
        return self.accuracy_of(model)

    @torch.no_grad()
    def accuracy_of(self, model: nn.Module) -> float:
        """Return the share of the test images that `model` classifies correctly."""
        right = [model(x).argmax(1) == y for x, y in self._tests]
        return float(torch.cat(right).double().mean())

    @cached_property
    def _tests(self) -> list[tuple[Tensor, Tensor]]:
        """The test images and labels in 16 parts, on the device."""
        parts = zip(np.array_split(self.test_x, 16), np.array_split(self.test_y, 16), strict=True)
        return [(self.normalised(x).to(self.device), torch.from_numpy(y).to(self.device)) for x, y in parts if len(x)]

    def save(self, path: Path) -> None:
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "initial"}
        arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
        rest = {name: value for name, value in values.items() if name not in arrays}
        np.savez(path, rest=json.dumps(rest), **arrays, **_numbered(self.initial))

    @classmethod
    def load(cls, path: str | Path) -> "Job":
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files}
        return cls(initial=_unnumbered(arrays), **json.loads(str(arrays.pop("rest"))), **arrays)


class UNet(nn.Module):
    """A U-Net of two levels for grey images with even sides, without buffers: outputs [n, 2, height, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.low, self.up = _level(1, width), _level(width, 2 * width), _level(3 * width, width)
        self.last = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.down(x)
        coarse = F.interpolate(self.low(F.max_pool2d(fine, 2)), scale_factor=2.0)
        return self.last(self.up(torch.cat([fine, coarse], 1)))


def _level(inputs: int, outputs: int) -> nn.Sequential:
    pairs = ((inputs, outputs), (outputs, outputs))
    layers = ((nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(4, o), nn.ReLU()) for i, o in pairs)
    return nn.Sequential(*itertools.chain.from_iterable(layers))


class NextWord(nn.Module):
    """A GRU that predicts the next of `WORDS` words at every position: outputs [n, words, length]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding, self.gru = nn.Embedding(WORDS, width), nn.GRU(width, width, batch_first=True)
        self.last = nn.Linear(width, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.gru(self.embedding(x))[0]).transpose(1, 2)


def network(name: str, inputs: int, width: int) -> nn.Module:
    """Return a network as one would write it by hand; its parameters are in the order of rayfed's network `name`."""
    if name == "cnn":
        features = [nn.Conv2d(1, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2)]
        return nn.Sequential(*features, nn.Flatten(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10))
    if name == "mlp":
        hidden = [nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
        return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(width, 10))
    if name == CIFAR_CNN:
        return _cifar_cnn()
    return {"unet": UNet, "gru": NextWord}[name](width)


def _cifar_cnn() -> nn.Module:
    """Return four convolutions and two layers, 1.7 million parameters, for colour images of 32 × 32 pixels."""
    first = [nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 10))


def set_parameters(model: nn.Module, values: Sequence[np.ndarray]) -> None:
    """Copy `values` into the parameters of `model`, which are as many and of the same shapes."""
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), values, strict=True):
            if parameter.shape != value.shape:
                raise ValueError(f"a parameter has the shape {tuple(parameter.shape)}, its value {value.shape}")
            parameter.copy_(torch.from_numpy(value))


def parameters_of(model: nn.Module) -> list[np.ndarray]:
    """Return copies of the parameters of `model`, in order."""
    return [parameter.detach().cpu().contiguous().numpy().copy() for parameter in model.parameters()]


def train(model: nn.Module, x: Tensor, y: Tensor, batches: Tensor, lr: float) -> int:
    """Take one step of SGD for each of `batches`, rows of example numbers, and return their number."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for rows in batches.to(x.device):
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    return len(batches)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run of a job on an engine leaves.

    Attributes:
        version: The engine's version.
        stamps: When each round was over, by `time.perf_counter`, which all processes of a machine share.
        steps: The number of gradient steps of all rounds.
        parameters: The final model, in the order of `network(...).parameters()`.
        began: When the engine was started.
        memory: The memory in bytes, at its highest before the last round was over, of all processes of the engine, in
            which shared pages count once, and of the largest one; 0 unless the job is watched.
        cycle: The rounds after which an evaluation comes again; 1 if there is none.
    """

    version: str
    stamps: list[float]
    steps: int
    parameters: list[np.ndarray]
    began: float = 0.0
    memory: tuple[int, int] = (0, 0)
    cycle: int = 1

    @property
    def seconds(self) -> list[float]:
        """The mean seconds of a round in every cycle but the first: the time from the end of the cycle before."""
        ends = self.stamps[self.cycle - 1 :: self.cycle]
        return [(end - start) / self.cycle for start, end in itertools.pairwise(ends)]

    @property
    def start_up(self) -> float:
        """The seconds from the start of the engine to the end of its first round."""
        return self.stamps[0] - self.began

    def save(self, path: str | Path) -> None:
        rest = asdict(self)
        np.savez(path, **_numbered(rest.pop("parameters")), rest=json.dumps(rest))

    @classmethod
    def load(cls, path: str | Path) -> "Outcome":
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files}
        return cls(parameters=_unnumbered(arrays), **json.loads(str(arrays["rest"])))


def arguments(description: str) -> argparse.Namespace:
    """Return the arguments of an engine's script: `job` and `outcome`, two paths."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("job", help="the job to run, an .npz file")
    parser.add_argument("outcome", help="the .npz file to write")
    return parser.parse_args()


def _numbered(parameters: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    return {f"parameter_{i}": value for i, value in enumerate(parameters)}


def _unnumbered(arrays: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Remove the parameters from `arrays` and return them in order."""
    return [arrays.pop(f"parameter_{i}") for i in range(sum(name.startswith("parameter_") for name in arrays))]
