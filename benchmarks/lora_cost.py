"""What LoRA costs beside a plain PyTorch loop: CPU seconds, bytes, a checkpoint, accuracy, and memory on two hosts.

An encoder of transformers gets adapters of rank 8 and a classifier. One client takes 27 steps of batch 16 on sequences
of 32 tokens in turn with the loop, both without dropout. Then 10 and 100 clients of as many examples train on two
hosts, where the proportional set sizes of all processes are added up.
"""

import argparse
import copy
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from _memory import shared_fairly, watching
from _rounds import results_folder

import rayfed
from rayfed.engine.evaluation import Evaluation
from rayfed.engine.host import LocalFleet
from rayfed.engine.server import Server
from rayfed.experiments.config import Config
from rayfed.experiments.given import Given
from rayfed.experiments.plan import Plan, make_plan

STEPS, BATCH, LENGTH, RANK, LR = 27, 16, 32, 8, 0.001


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", help="folder of an encoder; without it, a random one of the size of MiniLM")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of 27 steps, and as many of the loop")
    parser.add_argument("--clients", type=int, nargs="*", default=[10, 100], help="numbers of clients on two hosts")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    with results_folder() as folder:
        source = args.source or random_encoder(Path(folder, "encoder"))
        values: dict[str, Any] = {
            "model": {"name": "huggingface", "source": source, "lora": {"rank": RANK}},
            "local": {"batch_size": BATCH, "optimizer": "adam", "lr": LR},
            "rounds": args.rounds,
            "results": folder,
            "checkpoint.every": 1,
        }
        one_client(make_plan(Config.read(values), Given(clients=clients(1))))
        rayfed.run(values | {"rounds": 1}, clients=clients(1), quiet=True, keep_state=True)
        sizes = sorted(path.stat().st_size for path in Path(folder, "run").rglob("*") if path.is_file())
        print(f"largest file with a checkpoint in it: {sizes[-1]:,} bytes", flush=True)
        for count in args.clients:
            on_hosts(values | {"placement": {"hosts": 2, "cpus": 0.5}, "rounds": 2, "local.steps": 1}, count)


def random_encoder(folder: Path) -> str:
    from transformers import BertConfig, BertModel

    config = BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
    BertModel(config).save_pretrained(folder)
    return str(folder)


def clients(count: int) -> list[dict[str, Any]]:
    """Clients of 432 sequences, whose class is which of two kinds of words are more frequent in a sequence."""
    rng, made = np.random.default_rng(0), []
    for _ in range(count):
        y = rng.integers(0, 2, 2 * STEPS * BATCH)
        own = rng.random((len(y), LENGTH)) < 0.3
        x = np.where(own, 2000 + 500 * y[:, None] + rng.integers(0, 20, own.shape), rng.integers(3000, 9000, own.shape))
        half = STEPS * BATCH
        made.append({"train": (x[:half], y[:half]), "test": (x[half:], y[half:])})
    return made


def one_client(plan: Plan) -> None:
    """Train one client in turn with a loop on the same batches, and print seconds, bytes and accuracies."""
    plan = without_dropout(plan)
    loop = copy.deepcopy(plan.blueprint.model).train()
    evaluation = Evaluation(every=plan.config.rounds, points=())
    server = Server(plan.blueprint, plan.population, LocalFleet(plan.blueprint, plan.population), evaluation)
    trained = [value for value in loop.parameters() if value.requires_grad]
    train, test = (getattr(plan.population.clients[0], part) for part in ("train", "test"))
    drawn: list[torch.Tensor] = []
    take = server.fleet.host.data.parts(0)["train"].take  # type: ignore[attr-defined]
    part = type(server.fleet.host.data.parts(0)["train"])  # type: ignore[attr-defined]

    def taking(_: object, rows: torch.Tensor) -> Any:
        drawn.append(rows)  # the loop takes the same batches
        return take(rows)

    part.take = taking
    x, y = torch.from_numpy(np.asarray(train.x[:])), torch.from_numpy(train.y)
    seconds: dict[str, list[float]] = {"rayfed": [], "loop": []}
    records = server.run()
    for _ in range(plan.config.rounds):
        drawn.clear()
        began = time.process_time()
        record = next(record for record in records if record.stage == "round")
        seconds["rayfed"].append(time.process_time() - began)
        began = time.process_time()
        optimizer = torch.optim.Adam(trained, lr=LR)  # clients begin each round anew
        for rows in drawn:
            optimizer.zero_grad()
            F.cross_entropy(loop(x[rows]), y[rows]).backward()
            optimizer.step()
        seconds["loop"].append(time.process_time() - began)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    print(f"CPU seconds of {len(drawn)} steps: {medians}, ratio {medians['rayfed'] / medians['loop']:.3f}")
    count = sum(value.numel() * value.element_size() for value in trained)
    print(f"bytes down {record.bytes_down}, up {record.bytes_up}; of the {len(trained)} trained weights: {count:,}")
    held_out, labels = torch.from_numpy(np.asarray(test.x[:])), torch.from_numpy(test.y)
    with torch.no_grad():
        ours = server.ctx.task.predict(server.state["weights"], held_out)
        theirs = loop.eval()(held_out)
    accuracies = [(logits.argmax(1) == labels).float().mean().item() for logits in (ours, theirs)]
    difference = (ours - theirs).abs().max().item()
    print(f"held-out accuracy {accuracies[0]:.4f}, loop {accuracies[1]:.4f}; logits differ by up to {difference:.1e}")


def without_dropout(plan: Plan) -> Plan:
    for layer in plan.blueprint.model.modules():
        if isinstance(layer, torch.nn.Dropout):
            layer.p = 0.0
    return plan


def on_hosts(values: dict[str, Any], count: int) -> None:
    """Print the most memory of all processes while `count` clients train on two hosts."""
    most = [0]
    with watching(lambda processes: most.append(sum(map(shared_fairly, processes)))):
        rayfed.run(values | {"experiment": f"clients{count}"}, clients=clients(count), quiet=True)
    print(f"{count} clients on two hosts: at most {max(most) / 2**30:.2f} GiB in all processes", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
