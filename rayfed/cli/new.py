"""`rayfed new`: write a file to start from, a method, a dataset or a search space, with a test where it is code."""

import argparse
import keyword
import shlex

from rayfed.core.errors import UsageError
from rayfed.core.paths import check_name, working_folder, writing

_METHOD = '''\
"""$Name: name the paper here, and state the update rule: w ← w − η (∇f_i(w) + μ (w − w_t)), then Σ_i p_i w_i."""

from dataclasses import dataclass
from rayfed import option
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.trees import add, only, sub

@dataclass(frozen=True, kw_only=True)
class $Name(FedAvg):
    mu: float = option(0.1, low=0, help="μ, weight of the pull towards the weights received")  # key algorithm.mu

    def correct(self, ctx, grads, work, down):  # the gradients of a step; rayfed/algorithm.py has all hooks
        sent = only(grads, down["weights"])  # without weights that stay with the client
        return grads | add(sent, sub(only(work["weights"], sent), only(down["weights"], sent)), alpha=self.mu)
'''
_DATASET = '''\
"""$Name: name the source of the data here, their files and their licence."""

from dataclasses import dataclass
import numpy as np
from sklearn.datasets import load_digits
from rayfed import option
from rayfed.data import dataset

@dataclass(frozen=True, kw_only=True)
class $Name:
    classes: int = option(10, low=2, high=10, help="number of classes, from digit 0")  # key data.classes

    def load(self) -> dataset.Dataset:
        images, labels = load_digits(return_X_y=True)  # read your own files here
        images, labels = images[labels < self.classes], labels[labels < self.classes]
        pixels = (images.reshape(-1, 1, 8, 8) * 15).astype(np.uint8)  # [N, channels, height, width]
        bright = (images.mean(1) > images.mean()).astype(int)  # of each row, the position in `domains`
        is_test = np.arange(len(labels)) % 5 == 0  # without it, the partition chooses
        return dataset.Dataset.of("$name", pixels, labels, is_test=is_test, domain=bright, domains=("dark", "bright"))
'''
_TEST = """\
import rayfed

def test_the_contract_is_kept():
    found = rayfed.check({"$kind.name": "$name:$Name", "model.name": "mlp"})
    assert [finding for finding in found if not finding.kept] == []
"""
_SWEEP = """\
experiment: "$name"
seeds: [0, 1]  # every configuration runs with each
data: {name: mini_digits, per_domain: 60}
model: {name: mlp, hidden: [32]}
local: {epochs: 1, batch_size: 16, lr: 0.05}
rounds: 5
arms:  # what differs; the keys above are common to all
  - algorithm.name: fedavg
  - {algorithm.name: fedprox, algorithm.mu: {grid: [0.01, 0.1]}}  # one configuration for each value
"""
_CODE = {"method": ("algorithm", _METHOD, ""), "dataset": ("data", _DATASET, " model.name=mlp")}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write a file to start from into this folder: NAME.py with a method or a dataset, and test_NAME.py, which "
        "checks it; or NAME.yaml with a search space. What it holds runs at once. No file is overwritten."
    )
    parser.add_argument("kind", choices=[*_CODE, "sweep"], help="what to write")
    parser.add_argument("name", metavar="NAME", help="its name, such as my_method")


def execute(options: argparse.Namespace) -> int:
    name = check_name(options.name, "NAME")
    folder = working_folder()
    parts = name.split("_")
    class_name = "".join(part[:1].upper() + part[1:] for part in parts)
    if options.kind == "sweep":
        files = {f"{name}.yaml": _SWEEP}
        commands = [f"rayfed sweep {shlex.quote(name)}.yaml"]
    else:
        kind, template, more = _CODE[options.kind]
        test = _TEST.replace("$kind", kind)
        files = {f"{name}.py": template, f"test_{name}.py": test}
        chosen = f"{kind}.name={name}:{class_name}{more}"
        commands = [f"rayfed run {chosen} rounds=3", f"python -m pytest test_{name}.py"]
        if not name.isidentifier() or keyword.iskeyword(name):
            raise UsageError(f"{name}: not a name that Python can import; use letters, digits and _")
    for file in files:
        if (folder / file).exists():
            raise UsageError(f"{file}: is there already, and nothing is overwritten; choose another name")
    for file, text in files.items():
        with writing(folder / file):
            named = text.replace("$name", name).replace("$Name", class_name)
            (folder / file).write_text(named, encoding="utf-8")
    print(f"written: {', '.join(files)}; to run:")
    for command in commands:
        print(f"  {command}")
    return 0
