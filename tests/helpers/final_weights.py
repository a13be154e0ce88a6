"""Hashes of the state that every algorithm ends with, recorded once and compared by the tests.

`make record-weights` records them anew, in `final_weights.json` beside the tests of the algorithms. Do so only when
results are meant to change, in a commit of its own that says why.

Floating-point kernels differ between processors and versions of torch, so the file also holds the hash of a fixed
computation (`canary`); where that differs, hashes cannot be compared, the tests are skipped, and only the names of new
cases are recorded, with null for a hash.
"""

import functools
import hashlib
import json
import platform
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.algorithm_cases import CASES, default_run, everything, finished_alone
from rayfed.algorithms import ALGORITHMS
from rayfed.core.trees import named_tensors

FILE = Path(__file__).parents[1] / "algorithms" / "final_weights.json"


def values_hash(state: Any) -> str:
    """Return a hash of the types, shapes and bits of all tensors in `state`, whatever their names and order."""
    return _hash_of([tensor for _, tensor in named_tensors(state)])


def assert_as_recorded(kind: str, name: str, state: Any) -> None:
    """Compare `state` with the hash recorded for `name`, one of the "cases" or "sampled"; skip on other kernels."""
    recorded = json.loads(FILE.read_text())
    assert name in recorded[kind], f"nothing is recorded for {name!r}: run `make record-weights`"
    if canary() != recorded["canary"] or recorded[kind][name] is None:  # a method since then, on another machine
        pytest.skip(f"weights were recorded with torch {recorded['torch']} on {recorded['cpu']}; kernels differ here")
    assert values_hash(state) == recorded[kind][name], f"{name} ends with other weights than at {recorded['commit']}"


@functools.cache
def canary() -> str:
    """Return the hash of a fixed computation with the operations that training uses."""
    device_state = torch.get_rng_state()
    torch.manual_seed(0)
    x, y = torch.randn(6, 3, 8, 8), torch.arange(6) % 4
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(72, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 4)),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    rows = x.flatten(1)
    doubles = rows.double()
    results = [
        *(tensor.detach() for tensor in model.state_dict().values()),
        *(torch.fft.fft2(x).abs(), torch.cdist(rows, rows), rows @ rows.T, doubles @ doubles.T),
        *(
            rows.exp(),
            rows.sigmoid(),
            rows.abs().log1p(),
            rows.abs().sqrt(),
            rows.softmax(1),
            rows.mean(0),
            rows.var(0),
        ),
        *(torch.distributions.Laplace(0.0, 1.0).sample((5,)), torch.randperm(9), torch.rand(5)),
    ]
    torch.set_rng_state(device_state)
    return _hash_of(results)


def _hash_of(values: list[Tensor]) -> str:
    each = sorted(_digest(f"{t.dtype}|{tuple(t.shape)}|".encode() + _bytes(t)) for t in values)
    return _digest("".join(each).encode())


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    models = [line.split(": ", 1)[1] for line in info.read_text().splitlines() if line.startswith("model name")]
    return models[0] if models else platform.processor()


def _commit() -> str:
    command = ["git", "describe", "--always", "--abbrev=12", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=FILE.parent).stdout.strip()


def main() -> None:
    """Record the hashes of the present code, or where kernels differ, the names that are not recorded yet."""
    torch.set_num_threads(1)
    recorded = json.loads(FILE.read_text())
    if canary() != recorded["canary"]:
        for kind, names in (("cases", CASES), ("sampled", ALGORITHMS)):
            recorded[kind] = {name: recorded[kind].get(name) for name in sorted(names)}
        FILE.write_text(json.dumps(recorded, indent=1) + "\n")
        print(f"{FILE}: kernels differ from those of {recorded['cpu']}, so that new names have no hash")
        return
    recorded = {
        "commit": _commit(),
        "torch": torch.__version__,
        "cpu": _cpu(),
        "canary": canary(),
        # sorted, so that a new method adds lines and moves none
        "cases": {name: values_hash(everything(default_run(CASES[name]).server)) for name in sorted(CASES)},
        "sampled": {name: values_hash(everything(finished_alone(name))) for name in sorted(ALGORITHMS)},
    }
    FILE.write_text(json.dumps(recorded, indent=1) + "\n")
    print(f"{FILE}: {len(recorded['cases'])} cases and {len(recorded['sampled'])} algorithms with sampled clients")


if __name__ == "__main__":
    main()
