"""De Luca et al. 2022's own code: AFL, Gen-AFL, VM, Fed-IRM, FedAvg and the trainers of their centralised methods.

Their loops, trainers, losses and aggregation run as they are; only data loaders are replaced. Gen-AFL's λ_min and the
step size of λ, which their loop does not pass on, are given to the function that updates λ.
"""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from references.checkout import Checkout, Importer
from references.harness import PARTIAL, Case, Feed, Models, Setting, Trace, plain, server_weights

SOURCE = "huawei"
TRIED = "a50b474"

ROOT = "Federated_Domain_Generalization"

Mend = Callable[[Importer], None]
"""Changes a line of their code in memory."""

SIMPLEX = {"np.sum(np.asarray(u)[:i])": "np.sum(np.asarray(u)[: i + 1])"}
LAST_DOMAIN = {"penalty /= len(dataloader)": "penalty = base_penalty / len(dataloader)"}


class Net(nn.Module):
    """rayfed's network with what their loops expect of one."""

    def __init__(self, trace: Trace, **attributes: Any):
        super().__init__()
        self.network = copy.deepcopy(trace.initial)
        self.criterion = nn.CrossEntropyLoss()
        momentum = trace.setting.more.get("local.momentum", 0.0)
        self.optimizer = torch.optim.SGD(self.parameters(), lr=trace.setting.lr, momentum=momentum)
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.network(x)
        return output


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's weights under rayfed's names, without the trainer that is bound to it."""
    return plain(model.network)


class Rounds:
    """Stands for `individual_train`: starts a round of the feed before its first client, and pauses it after its last.

    In between, loaders give the data in their stored order, over which their servers compute losses.
    """

    def __init__(self, train: Callable[..., Any], feed: Feed):
        self.train, self.feed, self.round, self.left = train, feed, 0, 0

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if not self.left:
            self.round += 1
            self.feed.start(self.round)
            self.left = len(self.feed.trace.cohort(self.round))
        done = self.train(*arguments, **options)
        self.left -= 1
        if not self.left:
            self.feed.pause()
        return done


def steps(trace: Trace, clients: Sequence[int]) -> list[int]:
    """Return the numbers of local steps of a round."""
    setting = trace.setting
    return [setting.epochs * (trace.examples(i) // setting.batch_size) for i in clients]


def federated(module: str, mend: Mend | None = None, **options: Any) -> Callable[[Checkout, Trace], Models]:
    """Return a function that trains with the loop of the given name and returns the last model, and λ of AFL."""

    def theirs(checkout: Checkout, trace: Trace) -> Models:
        with checkout.importing(ROOT) as load:
            load("flsuite")
            loop = load(f"flsuite.algs.{module}")
            if mend is not None:
                mend(load)
            feed = Feed(trace)
            loop.individual_train = Rounds(loop.individual_train, feed)
            used: list[Any] = []
            average = loop.utils.aggregate.aggregate

            def noting(models: Any, weights: Any = None) -> Any:
                used.append(weights)
                return average(models, weights=weights)

            loop.utils.aggregate.aggregate = noting
            clients = range(len(trace.parts))
            loaders = [feed.loader(i) for i in clients]
            models = [Net(trace) for _ in clients]
            train = getattr(loop, module)
            model = train(models, loaders, trace.setting.rounds, local_steps=steps(trace, clients), **options)
            loop.utils.aggregate.aggregate = average
            feed.finish()
            models_ = {"server": weights(model)}
            return models_ | ({"lambda": {"lambda": torch.tensor(used[-1])}} if module == "afl" else {})

    return theirs


def lambda_step(step: float, smallest: float = 0.0, *, simplex: bool = False) -> Mend:
    """Return a change: the update of λ receives its step size and λ_min; also, the projection sums as it should."""

    def mend(load: Importer) -> None:
        loop = load("flsuite.algs.afl")
        loop.get_afl_lambda = partial(loop.get_afl_lambda, step_size_lambda=step, lambda_min=smallest)
        if simplex:
            projection = load("flsuite.utils.project")
            projection.project = load.mended(projection.project, SIMPLEX)

    return mend


def irm(**attributes: Any) -> Callable[[Checkout, Trace], Models]:
    """Return a function that trains with their FedAvg on models bound to their trainer of IRM, round by round.

    Their `fed_irm` binds it with a learning rate of 0.001.
    """

    def theirs(checkout: Checkout, trace: Trace) -> Models:
        with checkout.importing(ROOT) as load:
            load("flsuite")
            loop, trainers = load("flsuite.algs.fed_avg"), load("flsuite.algs.trainers")
            assign = load("flsuite.utils.aggregate", "assign_models")
            feed = Feed(trace)
            loop.individual_train = Rounds(loop.individual_train, feed)
            models = [trainers.IRM.bind_to(Net(trace, **attributes)) for _ in trace.parts]
            server: nn.Module = models[0]
            for round in range(1, trace.setting.rounds + 1):
                cohort = trace.cohort(round)
                chosen = assign([models[i] for i in cohort], copy.deepcopy(server))
                loaders = [feed.loader(i) for i in cohort]
                server = loop.fed_avg(chosen, loaders, 1, local_steps=steps(trace, cohort))
            feed.finish()
            return {"server": weights(server)}

    return theirs


def central(trainer: str, mend: Mend | None = None, **attributes: Any) -> Callable[[Checkout, Trace], Models]:
    """Return a function that trains one model with a batch of every client in each step."""

    def theirs(checkout: Checkout, trace: Trace) -> Models:
        with checkout.importing(ROOT) as load:
            load("flsuite")
            trainers = load("flsuite.algs.trainers")
            if mend is not None:
                mend(load)
            feed, model = Feed(trace), Net(trace, **attributes)
            getattr(trainers, trainer).bind_to(model)
            for round in range(1, trace.setting.rounds + 1):
                feed.start(round)
                model.trainer.update([feed.next(i) for i in range(len(trace.parts))], device=torch.device("cpu"))
            feed.finish()
            return {"server": weights(model)}

    return theirs


def all_domains(load: Importer) -> None:
    """Mend IRM's penalty, which is that of the last domain."""
    trainer = load("flsuite.algs.trainers", "IRM")
    trainer.update = load.mended(trainer.update, LAST_DOMAIN)


def with_lambda(trace: Trace) -> Models:
    return server_weights(trace) | {"lambda": {"lambda": trace.server["lambda"]}}


PROJECTION = (
    "Their projection onto the simplex (`utils/project.py`, line 12) sums the entries before the i-th, and the rule "
    "that it cites those up to the i-th; so it takes too many entries for positive, and λ is no projection as soon as "
    "one of them is 0. With the sum up to the i-th, they agree."
)
NO_LAMBDA_MIN = (
    "rayfed follows Alg. 1. The loop (`algs/afl.py`, line 174) calls `get_afl_lambda` without `lambda_min` and "
    "`step_size_lambda`, so that the code's Gen-AFL is AFL with a step of 0.1, whatever its arguments. With both "
    "passed on (and the projection mended), they agree."
)
TIMES_N = (
    "rayfed's `variant=paper` follows Eq. 24. Their weights (`algs/var_min.py`, lines 131 to 136) are 1/n + 2β(f − f̄), "
    "without the 1/n before the second term, as with β n times larger; that is `variant=code`."
)
WEIGHTS_PENALTY = (
    "rayfed follows Alg. 3, which differentiates with respect to a scalar. Their trainer (`algs/trainers.py`, lines "
    "144 to 149) takes the last layer's weights, unless `scalar=True`; that is `penalty=weights`."
)
ONE_DOMAIN = (
    "rayfed takes the mean of all domains' penalties. Their trainer (`algs/trainers.py`, line 210) divides the last "
    "domain's penalty by the number of domains and leaves out the sum, `base_penalty`. With the sum, they agree."
)


def cases() -> list[Case]:
    """Return all comparisons with that code."""
    return [*weighted(), *invariant(), *centralised()]


def weighted() -> list[Case]:
    """Return the comparisons of AFL, Gen-AFL and VM, which refuse sampling."""

    def afl(name: str, theirs: Any, variant: str, differs: str = "", **options: float) -> Case:
        setting = Setting({"name": name, **options}, rounds=4)
        return Case(name, SOURCE, setting, theirs, with_lambda, variant=variant, differs=differs)

    def vm(beta: float, variant: str, kind: str, differs: str = "", **setting: Any) -> Case:
        chosen = Setting({"name": "vm", "variant": kind, "beta": 0.4}, rounds=3, **setting)
        theirs = federated("var_min", var_beta=beta)
        return Case("vm", SOURCE, chosen, theirs, server_weights, variant=variant, differs=differs)

    clipped, both = "clipped, lambda_lr=3", "theirs with both passed on"
    general = {"lambda_lr": 3.0, "lambda_min": -0.1}
    return [
        afl("afl", federated("afl"), "not clipped"),
        afl("afl", federated("afl", lambda_step(3.0)), f"{clipped}, theirs too", PROJECTION, lambda_lr=3.0),
        afl(
            "afl",
            federated("afl", lambda_step(3.0, simplex=True)),
            f"{clipped}, theirs too, and with the sum up to i",
            lambda_lr=3.0,
        ),
        afl("gen_afl", federated("afl", lambda_min=-1.0), "not clipped, where it is AFL"),
        afl(
            "gen_afl",
            federated("afl", step_size_lambda=3.0, lambda_min=-0.1),
            f"{clipped}, lambda_min=-0.1",
            NO_LAMBDA_MIN,
            **general,
        ),
        afl(
            "gen_afl",
            federated("afl", lambda_step(3.0, -0.1, simplex=True)),
            f"{clipped}, lambda_min=-0.1, {both}, and with the sum up to i",
            **general,
        ),
        vm(0.4, "variant=code", "code"),
        vm(0.4, "variant=paper", "paper", TIMES_N, sizes=(20, 20, 20, 20)),
        vm(0.1, "variant=paper, clients of equal size, their β four times smaller", "paper", sizes=(20, 20, 20, 20)),
    ]


def invariant() -> list[Case]:
    """Return the comparisons of Fed-IRM."""
    found = []
    betas = {"beta": 4.0, "anneal": 6}
    theirs = {"irm_lambda": 4.0, "activate_after": 6}
    for partial_ in ({}, PARTIAL):

        def case(variant: str, run: Any, differs: str = "", partial_: Any = partial_, **options: Any) -> Case:
            setting = Setting(
                {"name": "fed_irm", **betas, **options},
                more={"local.momentum": 0.9, "local.keep_optimizer": True},
                lr=0.05,
                **partial_,
            )
            return Case("fed_irm", SOURCE, setting, run, server_weights, variant=variant, differs=differs)

        found += [
            case("", irm(**theirs), WEIGHTS_PENALTY),
            case("theirs with scalar=True", irm(scalar=True, **theirs)),
            case("penalty=weights", irm(**theirs), penalty="weights"),
        ]
    return found


def centralised() -> list[Case]:
    """Return the comparisons of the centralised methods, of six steps."""
    annealed = {"anneal": 3, "beta_start": 1.0}

    def case(name: str, theirs: Any, variant: str = "", differs: str = "", **options: Any) -> Case:
        setting = Setting({"name": name, **options}, rounds=6, more={"local.momentum": 0.9})
        return Case(name, SOURCE, setting, theirs, server_weights, variant=variant, differs=differs)

    penalties = {"irm_lambda": 4.0, "activate_after": 3}
    return [
        case("erm", central("ERM")),
        case("central_group_dro", central("GroupDRO", eta=0.5), q_lr=0.5),
        case("mm_rex", central("MMRex", lambda_min=-0.5), lambda_min=-0.5),
        case("v_rex", central("VRex", vrex_lambda=2.0, activate_after=3), beta=2.0, **annealed),
        case(
            "irm", central("IRM", **penalties), "penalty=weights", ONE_DOMAIN, beta=4.0, penalty="weights", **annealed
        ),
        case(
            "irm",
            central("IRM", all_domains, **penalties),
            "penalty=weights, theirs with the sum of the penalties",
            beta=4.0,
            penalty="weights",
            **annealed,
        ),
        case(
            "irm",
            central("IRM", all_domains, scalar=True, **penalties),
            "theirs with scalar=True and the sum of the penalties",
            beta=4.0,
            **annealed,
        ),
    ]
