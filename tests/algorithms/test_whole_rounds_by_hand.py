"""The five papers' methods in plain PyTorch, written from the papers alone, against whole runs of rayfed.

rayfed runs first, as users run it. Its batches and random numbers are recorded and given to the other side, as in
`benchmarks/references`, of which no checkout is needed here.
"""

import copy
import itertools
import math
from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from references.flbench_methods import watch_discriminator
from references.harness import (
    CLASSES,
    FEATURES,
    PARTIAL,
    TOLERANCE,
    Feed,
    Setting,
    largest_difference,
    mean,
    plain,
    record,
    server_weights,
)
from references.harness import in_float64 as computing_in_float64
from references.pfllib_methods import Changed
from torch import nn

from rayfed.algorithms import feddebias as feddebias_module
from rayfed.algorithms.adcol import Adcol
from rayfed.algorithms.feddebias import FedDebias
from rayfed.algorithms.fraug import FRAug
from rayfed.algorithms.mixup import MixedBatches

EVERYONE_OR_SOME = pytest.mark.parametrize("cohort", [{}, PARTIAL], ids=["all", "cohort"])


def check(setting, ours, theirs, watch=None, tolerance=TOLERANCE):
    trace = record(setting, watch)
    difference, where = largest_difference(ours(trace), theirs(trace))
    assert difference <= tolerance, where
    return trace


@pytest.fixture
def in_float64():
    with computing_in_float64():
        yield


def test_a_cohort_of_one_in_turn_passes_one_model_on():
    """Cyclical weight transfer (Chang et al. 2018), as FLamby's Cyclic is meant: one model visits all in turn."""
    turn_by_turn = {"sampling.name": "without_replacement"}
    setting = Setting({"name": "fedavg"}, cohort=1, rounds=7, more=turn_by_turn)

    def passed_on(trace):
        model, feed = copy.deepcopy(trace.initial), Feed(trace)
        for number in range(1, setting.rounds + 1):
            feed.start(number)
            (client,) = trace.cohort(number)
            sgd = torch.optim.SGD(model.parameters(), lr=setting.lr)
            for _ in range(setting.epochs):
                for x, y in feed.loader(client):
                    sgd.zero_grad()
                    F.cross_entropy(model(x), y).backward()
                    sgd.step()
        feed.finish()
        return {"server": plain(model)}

    trace = check(setting, server_weights, passed_on)
    visits = [trace.cohort(number)[0] for number in range(1, setting.rounds + 1)]
    assert sorted(visits[:4]) == [0, 1, 2, 3]
    assert len(set(visits[4:])) == 3


def rounds(trace):
    """Yield a feed and the cohort, round by round."""
    feed = Feed(trace)
    for round in range(1, trace.setting.rounds + 1):
        feed.start(round)
        yield feed, trace.cohort(round)
    feed.finish()


def batches(feed, client):
    for _ in range(feed.trace.setting.epochs):
        yield from feed.loader(client)


def loaded(trace, weights):
    model = copy.deepcopy(trace.initial)
    model.load_state_dict(weights)
    return model.train()


def descent(trace, parameters):
    momentum, decay = (trace.setting.more.get(f"local.{key}", 0.0) for key in ("momentum", "weight_decay"))
    return torch.optim.SGD(parameters, lr=trace.setting.lr, momentum=momentum, weight_decay=decay)


def take(step, loss):
    step.zero_grad()
    loss.backward()
    step.step()


def shares(trace, cohort=None):
    sizes = [trace.examples(i) for i in (range(len(trace.parts)) if cohort is None else cohort)]
    return torch.tensor(sizes, dtype=torch.float64) / sum(sizes)


def combination(weights, states):
    return {name: sum(w * state[name] for w, state in zip(weights, states, strict=True)).float() for name in states[0]}


@torch.no_grad()
def losses(trace, models, cohort):
    """The mean cross-entropy of each client's model over its training part."""
    parts = [trace.parts[i] for i in cohort]
    return torch.stack([F.cross_entropy(m(x), y).double() for m, (x, y) in zip(models, parts, strict=True)])


# FedDebias, Algorithm 1 to 3 and Eq. 3 to 6


@contextmanager
def watch_feddebias(extra):
    """Note θ, the proxy's pseudo-data, Mixup's batches, and the permutations that begin with each mean's images."""
    extra["rows"], extra["proxy"], extra["mixed"] = {}, {}, {}
    init, means, broadcast = FedDebias.init, FedDebias.means, FedDebias.broadcast
    prepare = MixedBatches.prepare

    def noting_init(self, ctx):
        server = init(self, ctx)
        extra["weights"], extra["projector"] = server["weights"], server.get("projector")
        return server

    def noting_means(self, ctx, down, data):
        drawn = extra["rows"][ctx.round, ctx.client] = []

        def randperm(count):
            drawn.append(torch.randperm(count))
            return drawn[-1]

        with mock.patch.object(feddebias_module, "torch", Changed(torch, randperm=randperm)):
            return means(self, ctx, down, data)

    def noting_broadcast(self, ctx, server):
        down = broadcast(self, ctx, server)
        extra["proxy"].setdefault(ctx.round, down.get("pseudo"))  # evaluation calls it once more
        return down

    def noting_prepare(self, ctx, batch):
        batch = prepare(self, ctx, batch)
        extra["mixed"].setdefault((ctx.round, ctx.client), []).append((batch.x, batch.y))
        return batch

    with (
        mock.patch.object(MixedBatches, "prepare", noting_prepare),
        mock.patch.object(FedDebias, "init", noting_init),
        mock.patch.object(FedDebias, "means", noting_means),
        mock.patch.object(FedDebias, "broadcast", noting_broadcast),
    ):
        yield


def random_sample_means(trace, round):
    """D_p: means of ten random images of one client each, in the order of the clients."""
    drawn = sorted((client, rows) for (when, client), rows in trace.extra["rows"].items() if when == round)
    return torch.stack([trace.parts[client][0][each[:10]].mean(0) for client, rows in drawn for each in rows])


def contrast(options, project, local, received, own, factor=None):
    """L_con of Eq. 5, and Eq. 6 with ⟨ỹ_p, y⟩ in `factor`."""
    corrected = local if factor is None else local - factor[:, None] * own
    scales = [1 / tau if options.get("tau_mode") == "divide" else tau for tau in (options["tau1"], options["tau2"])]
    positive = F.cosine_similarity(project(local), project(received)) * scales[0]
    negative = F.cosine_similarity(project(corrected), project(own)) * scales[1]
    return -(positive.exp() / (positive.exp() + negative.exp())).log().mean()


class Longer(nn.Module):
    """A network with an MLP between its features and a new head."""

    def __init__(self, model):
        super().__init__()
        self.model, self.head = copy.deepcopy(model), nn.Linear(7, CLASSES)
        del self.model.head
        self.projection = nn.Sequential(nn.Linear(FEATURES, 12), nn.ReLU(), nn.Linear(12, 7))

    def features(self, x):
        return self.projection(self.model.features(x))


def apart(model, x):
    """The features of a batch in training mode, which leaves the running statistics of batch norm alone."""
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm1d)]
    for norm in norms:
        norm.track_running_stats = False
    z = model.features(x)
    for norm in norms:
        norm.track_running_stats = True
    return z


def feddebias(trace):
    options = {"lam": 1.0, "mu": 0.5, "tau1": 2.0, "tau2": 2.0, "k_mix": 1}
    options |= trace.setting.algorithm.get("base", trace.setting.algorithm)
    proxy, once = options.get("pseudo") == "mixture", options.get("transfer") == "once"
    network = Longer(trace.initial) if options.get("projector_in_extractor") else trace.initial
    weights, theta = trace.extra["weights"], trace.extra["projector"]
    ascends = theta and options.get("max_step", True)
    for round, (feed, cohort) in enumerate(rounds(trace), 1):
        means = trace.extra["proxy"][round] if proxy else random_sample_means(trace, 0 if once else round - 1)
        trained, projectors = {}, {}
        for i in cohort:
            model, received = copy.deepcopy(network).train(), copy.deepcopy(network).train()
            model.load_state_dict(weights, strict=False)
            received.load_state_dict(weights, strict=False)
            project = nn.Sequential(nn.Linear(FEATURES, 12), nn.ReLU(), nn.Linear(12, 7)) if theta else nn.Identity()
            project.load_state_dict(theta or {})
            minimise = descent(trace, model.parameters())
            maximise = descent(trace, project.parameters()) if theta else None
            mixed = iter(trace.extra["mixed"].get((round, i), ()))
            for x, y in batches(feed, i):
                x, y = next(mixed, (x, y))
                rows, k = torch.arange(len(x)) % len(means), options["k_mix"]
                x_p, y_p, factor = means, torch.full((len(means), CLASSES), 1 / CLASSES), None
                if proxy and k:  # row j with the k local examples after row j
                    labels = y if y.is_floating_point() else F.one_hot(y, CLASSES).float()
                    others = (torch.arange(len(means))[:, None] + torch.arange(1, k + 1)) % len(x)
                    x_p, y_p = (x_p + x[others].sum(1)) / (k + 1), (y_p + labels[others].sum(1)) / (k + 1)
                    factor = (y_p[rows] * labels).sum(1)
                far = apart(received, x_p).detach()[rows]
                if ascends:
                    local, own = apart(model, x_p).detach(), apart(model, x).detach()
                    take(maximise, -contrast(options, project, local[rows], far, own, factor))
                local, own = apart(model, x_p), model.features(x)
                uniform = -(y_p * model.head(local).log_softmax(1)).sum(1).mean()
                loss = F.cross_entropy(model.head(own), y) + options["lam"] * uniform
                if options["mu"]:
                    loss = loss + options["mu"] * contrast(options, project, local[rows], far, own, factor)
                take(minimise, loss)
            trained[i], projectors[i] = numbers(plain(model)), plain(project)
        weighing = [1 / len(cohort)] * len(cohort) if options.get("weighting") == "equal" else shares(trace, cohort)
        weights = combination(weighing, [*trained.values()])
        theta = theta and combination(weighing, [*projectors.values()])
    return {"server": weights} | ({"projector": theta} if theta else {})


def our_feddebias(trace):
    theta = trace.server.get("projector")
    return {"server": numbers(trace.server["weights"])} | ({"projector": theta} if theta else {})


DIVIDE = {"tau_mode": "divide", "tau1": 1.5, "tau2": 0.7}
MIXTURE = {"pseudo": "mixture", "proxy": "noise"}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"transfer": "once", "tau1": 1.5, "tau2": 0.0},
        {"pseudo_samples": 3, "mu": 0.0},
        {"pseudo_samples": 9, "lam": 0.0, "mu": 2.0, "tau_mode": "divide", "weighting": "equal"},
        {"max_step": False},
        {"projector": False},
        {"projector_in_extractor": True},
        DIVIDE | {"lam": 0.0, "max_step": False},
        DIVIDE | {"lam": 0.0, "projector": False},
        MIXTURE,
        MIXTURE | {"k_mix": 2, "pseudo_samples": 9},
        MIXTURE | {"k_mix": 0, "pseudo_samples": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("changes", [{}, PARTIAL | {"network": "mlp_bn", "lr": 0.05, "more": {"local.momentum": 0.5}}])
def test_feddebias(options, changes):
    setting = Setting({"name": "feddebias", "widths": [12, 7]} | options, **changes)
    check(setting, our_feddebias, feddebias, watch_feddebias)


@pytest.mark.parametrize("options", [{}, {"lam": 0.0, "weighting": "equal"}], ids=str)
@pytest.mark.parametrize("changes", [{}, PARTIAL | {"network": "mlp_bn", "lr": 0.05, "more": {"local.momentum": 0.5}}])
def test_feddebias_divides_by_temperatures_with_its_projector_in_the_extractor(in_float64, options, changes):
    """Projected features come near 0, where the cosine magnifies float32's rounding a hundred thousand times."""
    algorithm = {"name": "feddebias", "widths": [12, 7], "projector_in_extractor": True} | DIVIDE | options
    check(Setting(algorithm, **changes), our_feddebias, feddebias, watch_feddebias, tolerance=1e-8)


@pytest.mark.parametrize("options", [{}, MIXTURE, MIXTURE | {"k_mix": 2, "pseudo_samples": 9, "max_step": False}])
@pytest.mark.parametrize("changes", [{}, PARTIAL | {"network": "mlp_bn", "lr": 0.05}])
def test_feddebias_under_mixup(options, changes):
    algorithm = {"name": "mixup", "alpha": 1.0, "base": {"name": "feddebias", "widths": [12, 7]} | options}
    trace = check(Setting(algorithm, **changes), our_feddebias, feddebias, watch_feddebias)
    assert any(((y > 0) & (y < 1)).any() for mixed in trace.extra["mixed"].values() for _, y in mixed)


# ADCOL, Algorithm 1 and Eq. 2


@contextmanager
def watch_adcol(extra):
    """Note also whose representations are sent."""
    extra["sent"] = []
    select = Adcol.select_records

    def noting(self, ctx, client, examples):
        client, rows = select(self, ctx, client, examples)
        extra["sent"].append(slice(None) if rows is None else rows)
        return client, rows

    with watch_discriminator(extra), mock.patch.object(Adcol, "select_records", noting):
        yield


def adcol(trace):
    parties, mu = len(trace.parts), trace.setting.algorithm["mu"]
    models = [copy.deepcopy(trace.initial) for _ in range(parties)]
    widths = [(FEATURES, 16), (16, 16), (16, parties)]
    discriminator = nn.Sequential(*[part for width in widths for part in (nn.Linear(*width), nn.ReLU())][:-1])
    discriminator.load_state_dict(trace.extra["discriminator"])
    epochs, sent = iter(trace.extra["batches"]), iter(trace.extra["sent"])
    for feed, cohort in rounds(trace):
        vectors = []
        for i in cohort:
            model, sgd = models[i].train(), descent(trace, models[i].parameters())
            for x, y in batches(feed, i):
                z = model.features(x)
                target = torch.full((len(x), parties), 1 / parties)
                kl = (target * (target.log() - discriminator(z).softmax(1).log())).sum(1).mean()
                take(sgd, F.cross_entropy(model.head(z), y) + mu * kl)
            model.eval()
            vectors.append(model.features(trace.parts[i][0][next(sent)]).detach())
        labels = torch.cat([torch.full((len(z),), i) for i, z in zip(cohort, vectors, strict=True)])
        sgd = torch.optim.SGD(discriminator.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-5)
        for _ in range(2):
            for rows in next(epochs):
                take(sgd, F.cross_entropy(discriminator(torch.cat(vectors)[rows]), labels[rows]))
    return {f"client {i}": plain(models[i]) for i in trace.clients} | {"discriminator": plain(discriminator)}


def our_adcol(trace):
    models = {f"client {i}": state["weights"] for i, state in trace.clients.items()}
    return models | {"discriminator": trace.server["discriminator"]}


@EVERYONE_OR_SOME
@pytest.mark.parametrize("sampling", [1.0, 0.6])
def test_adcol(sampling, cohort):
    ours = {"mu": 1.5, "hidden": [16, 16], "sampling": sampling, "server_batch_size": 8}
    ours |= {"server_epochs": 2, "server_lr": 0.1}
    setting = Setting({"name": "adcol", **ours}, network="mlp_bn", more={"local.momentum": 0.9}, **cohort)
    sent = check(setting, our_adcol, adcol, watch_adcol).extra["sent"]
    if sampling < 1:  # rows are drawn anew in each round, without repetition
        assert len({tuple(sorted(rows.tolist())) for rows in sent}) == len(sent)
        assert all(len(set(rows.tolist())) == len(rows) for rows in sent)


# AFL and Gen-AFL, Algorithm 1; VM, Eq. 24; Fed-IRM, Algorithm 3


def trained_from(trace, feed, weights, cohort):
    models = []
    for i in cohort:
        models.append(loaded(trace, weights))
        sgd = descent(trace, models[-1].parameters())
        for x, y in batches(feed, i):
            take(sgd, F.cross_entropy(models[-1](x), y))
    return models


def projected(point, lowest, total):
    """The nearest point with sum `total` and no coordinate below `lowest`: one shift for all, found by bisection."""
    low, high = float(lowest - point.max()), float(1 - point.min())
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (low, middle) if (point + middle).clamp(min=lowest).sum() > total else (middle, high)
    return (point + low).clamp(min=lowest)


def afl(trace):
    options, weights, current = trace.setting.algorithm, plain(trace.initial), shares(trace)
    for number, (feed, cohort) in enumerate(rounds(trace)):
        if number:
            present = list(cohort)
            f = losses(trace, [loaded(trace, weights)] * len(present), present)
            moved = current[present] + options["lambda_lr"] * f
            current[present] = projected(moved, options["lambda_min"], current[present].sum())
        models = trained_from(trace, feed, weights, cohort)
        chosen = current[list(cohort)]
        weights = combination(chosen / chosen.sum(), [plain(model) for model in models])
    return {"server": weights, "λ": {"lambda": current}}


@EVERYONE_OR_SOME
@pytest.mark.parametrize(
    ("name", "lowest", "rate"), [("afl", 0.0, 0.1), ("afl", 0.0, 10.0), ("gen_afl", -1.0, 0.1), ("gen_afl", -0.1, 10.0)]
)
def test_afl_and_gen_afl(name, lowest, rate, cohort):
    setting = Setting({"name": name, "lambda_lr": rate, "lambda_min": lowest}, **({"rounds": 3} | cohort))
    trace = check(setting, lambda trace: server_weights(trace) | {"λ": {"lambda": trace.server["lambda"]}}, afl)
    assert (trace.server["lambda"].min() < lowest + 1e-9) == (rate == 10.0)


def vm(trace):
    beta, code = trace.setting.algorithm["beta"], trace.setting.algorithm["variant"] == "code"
    weights = plain(trace.initial)
    for feed, cohort in rounds(trace):
        models = trained_from(trace, feed, weights, cohort)
        f = losses(trace, models, cohort)
        p = torch.full_like(f, 1 / len(f)) if code else shares(trace, cohort)
        q = torch.ones_like(f) if code else p  # the authors' code leaves out 1/n in the second term
        following = {}
        for name, old in weights.items():
            steps = torch.stack([old - plain(model)[name] for model in models]).double().flatten(1)
            spread = (q * (f - p @ f)) @ (steps - p @ steps)
            following[name] = old - (p @ steps + 2 * beta * spread).view_as(old).float()
        weights = following
    return {"server": weights}


@EVERYONE_OR_SOME
@pytest.mark.parametrize("variant", ["paper", "code"])
def test_vm(variant, cohort):
    check(Setting({"name": "vm", "beta": 1.0, "variant": variant}, **({"rounds": 3} | cohort)), server_weights, vm)


def fed_irm(trace):
    options, weights, updates, kept = trace.setting.algorithm, plain(trace.initial), {}, {}
    for feed, cohort in rounds(trace):
        trained = {}
        for i in cohort:
            model = loaded(trace, weights)
            sgd = descent(trace, model.parameters())
            if i in kept:
                sgd.load_state_dict(kept[i])
            for x, y in batches(feed, i):
                count = updates[i] = updates.get(i, 0) + 1
                beta = options["beta_start"] if count <= options["anneal"] else options["beta"]
                if count == options["anneal"] + 1:
                    sgd = descent(trace, model.parameters())
                scale = torch.ones((), requires_grad=True)
                loss = F.cross_entropy(scale * model(x), y)
                squared = model.head.weight if options["penalty"] == "weights" else scale
                (gradient,) = torch.autograd.grad(loss, squared, create_graph=True)
                take(sgd, (loss + beta * gradient.square().sum()) / max(beta, 1))
            trained[i], kept[i] = plain(model), sgd.state_dict()
        weights = mean(trained, trace)
    return {"server": weights}


@EVERYONE_OR_SOME
@pytest.mark.parametrize("penalty", ["scale", "weights"])
def test_fed_irm(penalty, cohort):
    options = {"beta": 20.0, "beta_start": 0.5, "anneal": 6, "penalty": penalty}
    setting = Setting(
        {"name": "fed_irm", **options}, more={"local.momentum": 0.9, "local.keep_optimizer": True}, **cohort
    )
    check(setting, server_weights, fed_irm)


# FRAug, Algorithm 1 and Eq. 1 to 6


@contextmanager
def watch_fraug(extra):
    """Note the initial generator and RTNets, all noise, and each step's metrics."""
    extra["rtnets"], extra["noise"], extra["metrics"] = {}, {}, {}
    init, join, draw, step = FRAug.init, FRAug.join, FRAug.draw_noise, FRAug.step

    def noting_init(self, ctx):
        server = init(self, ctx)
        extra["generator"] = server.get("generator", {})
        return server

    def noting_join(self, ctx):
        state = join(self, ctx)
        extra["rtnets"][ctx.client] = state.get("rtnet", {})
        return state

    def noting_draw(self, ctx, *shape):
        z = draw(self, ctx, *shape)
        extra["noise"].setdefault((ctx.round, ctx.client), []).append(z)
        return z

    def noting_step(self, ctx, work, down, batch):
        work, metrics = step(self, ctx, work, down, batch)
        extra["metrics"].setdefault(ctx.client, []).append(metrics)
        return work, metrics

    hooks = {"init": noting_init, "join": noting_join, "draw_noise": noting_draw, "step": noting_step}
    with ExitStack() as stack:
        for name, value in hooks.items():
            stack.enter_context(mock.patch.object(FRAug, name, value))
        yield


LATENT, MOMENTUM = 5, 0.5


def stack_of(*widths):
    """Linear layers with batch norm, and ReLU between them."""
    layers = [
        part for pair in itertools.pairwise(widths) for part in (nn.Linear(*pair), nn.BatchNorm1d(pair[1]), nn.ReLU())
    ]
    return nn.Sequential(*layers[:-1])


def discrepancy(x, y):
    """MMD² with five Gaussian kernels about the mean squared distance of distinct pairs."""
    points = torch.cat([x, y])
    squares = (points[:, None] - points).square().sum(2)
    middle = squares.detach().sum() / (len(points) * (len(points) - 1))
    kernel = sum((-squares / (middle * 2.0**j)).exp() for j in range(-2, 3))
    n = len(x)
    return kernel[:n, :n].mean() + kernel[n:, n:].mean() - 2 * kernel[:n, n:].mean()


class FRAugClient:
    """A client's model, generator and RTNet, their optimisers, and its prototypes."""

    def __init__(self, trace, number):
        defaults = {"use_generator": True, "use_rtnet": True, "interpolate": True, "embeddings": "both"}
        self.paper = trace.setting.algorithm.get("variant") == "paper"
        self.options, self.trace, self.number = defaults | trace.setting.algorithm, trace, number
        self.model = copy.deepcopy(trace.initial)
        self.generator = nn.Sequential(stack_of(LATENT + CLASSES, FEATURES, FEATURES), nn.ReLU())
        self.rtnet = stack_of(FEATURES + CLASSES, LATENT, FEATURES)
        self.rtnet.load_state_dict(unprefixed(trace.extra["rtnets"][number]), strict=self.options["use_rtnet"])
        self.steps = [descent(trace, self.model.parameters())]
        for module, rate in ((self.generator, "lr_g"), (self.rtnet, "lr_m")):
            self.steps.append(torch.optim.SGD(module.parameters(), lr=self.options[rate], momentum=MOMENTUM))
        self.prototypes, self.read, self.metrics = {}, 0, []

    def start(self, round, weights, generator):
        self.model.load_state_dict(weights, strict=False)
        self.generator[0].load_state_dict(generator, strict=False)
        self.noise = iter(self.trace.extra["noise"][round, self.number])
        exponent = self.options["gamma"] * (round - 1 - self.trace.setting.rounds)
        self.strength = math.exp(exponent) if self.options["interpolate"] else 1.0
        self.rate = 0.3 * (math.exp(-5 * (1 - round / self.trace.setting.rounds) ** 2) if self.paper else 1)

    def anchors(self, u, y, averages, y_c):
        pairs = {"u": (u, y), "uc": (averages, y_c)}
        return [pair for name, pair in pairs.items() if self.options["embeddings"] in (name, "both")]

    def augmented(self, real, y, strength):
        """û; whether generator and RTNet train is up to the caller."""
        v = next(self.noise)
        if self.options["use_generator"]:
            v = self.generator(torch.cat([v, F.one_hot(y, CLASSES)], 1)).detach()
        if not self.options["use_rtnet"]:
            return (1 - strength) * real + strength * v
        return real + strength * self.rtnet(torch.cat([v, F.one_hot(y, CLASSES)], 1))

    def train(self, x, y):
        theta, omega, phi = self.steps
        # stage 1, the classifier
        self.model.train(), self.generator.eval(), self.rtnet.eval()
        u = self.model.features(x)
        for c in set(y.tolist()):
            new = u.detach()[y == c].mean(0)
            old = self.prototypes.get(c, new)
            self.prototypes[c] = (1 - self.rate) * old + self.rate * new
        known = sorted(self.prototypes)
        turns = range(CLASSES) if self.paper else range(self.read, self.read + len(y))
        y_c = torch.tensor([known[turn % len(known)] for turn in turns])
        self.read += len(y)
        averages = torch.stack([self.prototypes[int(c)] for c in y_c])
        kappa = min(0.5, self.strength)
        real = F.cross_entropy(self.model.head(u), y)
        statistics = {name: buffer.clone() for name, buffer in self.model.named_buffers()}  # of real embeddings
        synthetic = [
            (self.model.head(self.augmented(anchors.detach(), labels, self.strength).detach()), labels)
            for anchors, labels in self.anchors(u, y, averages, y_c)
        ]
        if self.paper:
            loss = real + self.total(synthetic, F.cross_entropy, len(known))
        else:
            loss = (1 - kappa) * real + kappa * sum(F.cross_entropy(*each) for each in synthetic) / len(synthetic)
        take(theta, loss)
        self.metrics.append({"loss": loss})
        self.model.load_state_dict(statistics, strict=False)
        # stage 2, the generator
        self.model.eval(), self.generator.train()
        u = self.model.features(x).detach()
        if self.options["use_generator"]:
            y_c = y if self.paper else y_c
            averages = torch.stack([self.prototypes[int(c)] for c in y_c])
            v = self.generator(torch.cat([next(self.noise), F.one_hot(y_c, CLASSES)], 1))
            far = discrepancy(v, u) if self.options["distance_g"] == "mmd" else F.mse_loss(v, averages)
            loss = F.cross_entropy(self.model.head(v), y_c) - self.options["alpha"] * far
            take(omega, loss)
            self.metrics[-1] |= {"generator_loss": loss, "generated_norm": v.square().sum(1).sqrt().mean()}
        # stage 3, the RTNet
        if not self.options["use_rtnet"]:
            return
        self.generator.eval(), self.rtnet.train()
        if self.paper:
            y_c = torch.tensor([known[c % len(known)] for c in range(CLASSES)])
            averages = torch.stack([self.prototypes[int(c)] for c in y_c])
        parts = []
        for real, labels in self.anchors(u, y, averages, y_c):
            moved = self.augmented(real, labels, self.strength if self.paper else 1.0)
            parts.append((self.model.head(moved).softmax(1), moved, real))
        loss = self.total(parts, self.far, len(known)) if self.paper else sum(self.far(*p) for p in parts) / len(parts)
        take(phi, loss)
        self.metrics[-1]["rtnet_loss"] = loss

    def far(self, p, moved, real):
        near = discrepancy(moved, real) if self.options["distance_rt"] == "mmd" else F.mse_loss(moved, real)
        return (p * p.log()).sum(1).mean() + self.options["beta"] * near

    def total(self, sets, term, classes):
        """The term of the batch's embeddings, if they are augmented, and one of each prototype, if those are."""
        batch, prototypes = {"u": (sets, []), "uc": ([], sets), "both": (sets[:1], sets[1:])}[
            self.options["embeddings"]
        ]
        each = [[rows[c : c + 1] for rows in prototype] for prototype in prototypes for c in range(classes)]
        return sum(term(*rows) for rows in [*batch, *each])


def unprefixed(weights):
    return {name.removeprefix("layers."): value for name, value in weights.items()}


def numbers(weights):
    """Weights without the counters of batch norm."""
    return {name: value for name, value in weights.items() if value.is_floating_point()}


def by_step(metrics):
    return {name: torch.stack([step[name] for step in metrics]) for name in metrics[0]}


def fraug(trace):
    clients = {i: FRAugClient(trace, i) for i in trace.clients}
    local = {name for name in trace.initial.state_dict() if ".bn" in name}
    weights, generator = plain(trace.initial), unprefixed(trace.extra["generator"])
    weights = {name: value for name, value in weights.items() if name not in local}
    for round, (feed, cohort) in enumerate(rounds(trace), 1):
        for i in cohort:
            clients[i].start(round, weights, generator)
            for x, y in batches(feed, i):
                clients[i].train(x, y)
        equal = trace.setting.algorithm.get("variant") == "paper"
        models = {i: plain(clients[i].model, keep=lambda name: name not in local) for i in cohort}
        generators = {i: numbers(plain(clients[i].generator[0])) for i in cohort}
        if equal:
            p = [1 / len(cohort)] * len(cohort)
            weights, generator = (combination(p, list(each.values())) for each in (models, generators))
        else:
            weights, generator = (mean(each, trace) for each in (models, generators))
    found = {"server": weights}
    found |= {"generator": numbers(generator)} if trace.extra["generator"] else {}
    for i, each in clients.items():
        found[f"client {i}"] = numbers(plain(each.model, keep=local.__contains__))
        found[f"client {i} prototypes"] = {str(c): each.prototypes[c] for c in range(CLASSES)}
        found[f"client {i} metrics"] = by_step(each.metrics)
        if trace.extra["rtnets"][i]:
            found[f"client {i} rtnet"] = numbers(plain(each.rtnet))
    return found


def our_fraug(trace):
    found = server_weights(trace)
    if "generator" in trace.server:
        found["generator"] = numbers(unprefixed(trace.server["generator"]))
    for i, state in trace.clients.items():
        found[f"client {i}"] = numbers(state["weights"])
        found[f"client {i} prototypes"] = {str(c): state["prototypes"][c] for c in range(CLASSES)}
        found[f"client {i} metrics"] = by_step(trace.extra["metrics"][i])
        if "rtnet" in state:
            found[f"client {i} rtnet"] = numbers(unprefixed(state["rtnet"]))
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"noise": "uniform", "distance_rt": "mse"},
        {"distance_g": "prototype_mse", "interpolate": False},
        {"embeddings": "u"},
        {"embeddings": "uc"},
        {"use_rtnet": False},
        {"use_rtnet": False, "interpolate": False},
        {"use_generator": False},
        {"variant": "paper"},
        {"variant": "paper", "distance_rt": "mse", "embeddings": "uc", "distance_g": "prototype_mse"},
        {"variant": "paper", "embeddings": "u"},
    ],
    ids=str,
)
@pytest.mark.parametrize("changes", [{}, PARTIAL | {"head": "mlp_bn"}])
def test_fraug(in_float64, options, changes):
    more = {"bn_mode": "all", "latent": LATENT, "momentum": MOMENTUM, "gamma": 0.4, "alpha": 0.3, "beta": 0.7}
    more |= {"lr_g": 0.03, "lr_m": 0.02, "distance_g": "mmd", "distance_rt": "mmd"}
    setting = Setting({"name": "fraug"} | more | options, network="mlp_bn", more={"local.momentum": 0.5}, **changes)
    # batch norm and MMD magnify rounding, in float32 and for the two points of a class
    check(setting, our_fraug, fraug, watch_fraug, tolerance=1e-6 if "variant" in options else 1e-8)


# DBE, Algorithm 1 and Eq. 6 to 9


def dbe(trace):
    kappa, mu = trace.setting.algorithm["kappa"], trace.setting.algorithm["mu"]
    weights, feed, consensus = plain(trace.initial), Feed(trace), torch.zeros(FEATURES)
    feed.start(0, "setup")
    for i, share in enumerate(shares(trace).tolist()):
        consensus = consensus + share * dbe_round(feed, i, weights, None, torch.zeros(FEATURES), 0.0, mu)[1]
    feed.finish()
    biases, means = {}, {}
    for feed, cohort in rounds(trace):
        trained = {}
        for i in cohort:
            biases[i] = biases.get(i, torch.zeros(FEATURES)).requires_grad_()
            model, means[i] = dbe_round(feed, i, weights, biases[i], consensus, kappa, mu)
            trained[i] = plain(model)
        weights = mean(trained, trace)
    kept = {
        f"client {i}": {"dbe.bias": biases[i], "dbe.mean": means[i], "dbe.consensus": consensus} for i in trace.clients
    }
    return {"server": weights} | kept


def dbe_round(feed, client, weights, bias, consensus, kappa, mu):
    """The model after local training, and the running mean of its features; `bias` is trained in place."""
    model, running = loaded(feed.trace, weights), torch.zeros(FEATURES)
    sgd = descent(feed.trace, model.parameters())
    plain_sgd = torch.optim.SGD([torch.zeros(0) if bias is None else bias], lr=feed.trace.setting.lr)
    for x, y in batches(feed, client):
        z = model.features(x)
        running = (1 - mu) * running.detach() + mu * z.mean(0)
        loss = F.cross_entropy(model.head(z if bias is None else z + bias), y)
        plain_sgd.zero_grad()
        take(sgd, loss + kappa * (running - consensus).square().mean() / 2)
        plain_sgd.step()
    return model, running.detach()


@EVERYONE_OR_SOME
@pytest.mark.parametrize(("kappa", "mu"), [(5.0, 1.0), (20.0, 0.3)])
def test_dbe(kappa, mu, cohort):
    def ours(trace):
        return server_weights(trace) | {f"client {i}": state["weights"] for i, state in trace.clients.items()}

    more = {"local.momentum": 0.9, "local.weight_decay": 0.1} if mu < 1 else {}
    check(Setting({"name": "dbe", "kappa": kappa, "mu": mu}, more=more, **cohort), ours, dbe)
