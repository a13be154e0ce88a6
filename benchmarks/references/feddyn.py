"""FedDyn's authors (Acar et al. 2021): their server and local training run whole, except for evaluation."""

import copy
import os
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from references.checkout import Checkout, anything
from references.harness import PARTIAL, Case, Feed, Models, Setting, Trace, plain

SOURCE = "feddyn"
TRIED = "48a19fa"


def theirs(checkout: Checkout, trace: Trace) -> Models:
    """Return the cloud model and the mean of the clients' models after training with `train_FedDyn`."""
    setting, feed = trace.setting, Feed(trace)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    with checkout.importing(".", anything("LEAF.utils_eval.language_utils", "LEAF.utils_eval.model_utils")) as load:
        methods, general = load("utils_methods"), load("utils_general")
        os.environ.pop("CUDA_VISIBLE_DEVICES")  # `utils_general` sets it
        if visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
        os.makedirs("Output/lockstep")
        xs, ys = zip(*((x.numpy(), y.numpy()) for x, y in trace.parts), strict=True)
        data = SimpleNamespace(
            n_client=len(xs), clnt_x=xs, clnt_y=ys, tst_x=xs[0], tst_y=ys[0], name="lockstep", dataset=""
        )
        rounds = iter(range(1, setting.rounds + 1))

        def draw(size: int) -> np.ndarray:
            """Begin a round and return uniform draws with which its cohort is chosen."""
            round = next(rounds)
            feed.start(round)
            return np.array([0.0 if i in trace.cohort(round) else 1.0 for i in range(size)])

        def dataset(x: Any, y: Any, **_: Any) -> int:
            return next(i for i, own in enumerate(xs) if own is x)

        loaders = SimpleNamespace(DataLoader=lambda client, batch_size, shuffle: feed.loader(client, batch_size))
        with (
            mock.patch.object(general, "Dataset", dataset),
            mock.patch.object(general, "data", loaders),
            mock.patch.object(methods, "get_acc_loss", return_value=(0.0, 0.0)),
            mock.patch.object(np.random, "uniform", draw),
        ):
            models = methods.train_FedDyn(
                data,
                act_prob=0.5,
                learning_rate=setting.lr,
                batch_size=setting.batch_size,
                epoch=setting.epochs,
                com_amount=setting.rounds,
                print_per=1,
                weight_decay=0.0,
                model_func=lambda: copy.deepcopy(trace.initial),
                init_model=trace.initial,
                alpha_coef=setting.algorithm["alpha"],
                save_period=1,
                lr_decay_per_round=1.0,
            )
        feed.finish()
        selected, cloud = models[0], models[-1]
        return {"server": plain(cloud[-1]), "scored": plain(selected[-1])}


def ours(trace: Trace) -> Models:
    return {"server": trace.server["weights"], "scored": trace.server["mean"]}


UNEQUAL = (
    "rayfed follows the paper, whose Alg. 1 has one α. `utils_methods.py`, line 387, divides it by N times the "
    "client's share of all examples. With clients of equal size they agree."
)


def cases() -> list[Case]:
    """Return all comparisons with the authors' FedDyn."""
    found = []
    for partial in ({}, PARTIAL):
        for sizes, differs in ((20, 20, 20, 20), ""), ((10, 20, 30, 40), UNEQUAL):
            setting = Setting({"name": "feddyn", "alpha": 0.1}, sizes=sizes, **partial)
            variant = "" if differs else "clients of equal size"
            found.append(Case("feddyn", SOURCE, setting, theirs, ours, variant=variant, differs=differs))
    return found
