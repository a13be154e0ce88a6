"""FRAug's authors (Chen et al. 2023): their clients' three training stages, networks, losses, and averaging.

Their data sets, loaders and sampling are replaced, and so are their random initial weights. Their server averages at
the start of a round the models of the clients that it has drawn, as earlier rounds have left them; here it averages at
the end of a round those that took part, which is the same thing where all do.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from rayfed.algorithms.fraug import FRAug
from references.checkout import Checkout, Importer, anything
from references.harness import CLASSES, FEATURES, Case, Feed, Models, Trace, pair, plain

SOURCE = "fraug"
TRIED = "816e8be"

LATENT, MOMENTUM = 5, 0.5

MODEL = {"encoder.": "features.", "classifier.layers.": "head."}
GENERATOR = {f"decoder.{theirs}.": f"layers.{i}." for theirs, i in (("fc0", 0), ("local_bn0", 1), ("fc1", 3))}
GENERATOR |= {"decoder.local_bn1.": "layers.4."}
RTNET = {
    "encoder.fc0.": "layers.0.",
    "encoder.bn0.": "layers.1.",
    "decoder.fc1.": "layers.3.",
    "decoder.bn1.": "layers.4.",
}

CONFIG = {
    "model_path": ".",
    "user_per_domain": 1,
    "num_users": -1,
    "portion": 1.0,
    "seed": 0,
    "model": "small",
    "dataset": "own",
    "device": "cpu",
    "class_num": CLASSES,
    "algorithm": "FRAug",
    "optimizer": "SGD",
    "local_momentum": MOMENTUM,
    "cls_mean_momentum": 0.3,
    "cls_criterion_type_FT": "entropy",
    "use_G": True,
    "start_add_G": 0,
    "steps_using_G": 1,
    "inter_form": "exp",
    "FTNet_with_BN": True,
    "FTNet_with_cls": True,
}
"""Their settings that are the same in all comparisons."""

FIRST_MEAN = {
    "* self.cls_mean_momentum": "* self.cls_mean_momentum; "
    "momentum = torch.where(self.seen > 0, momentum, torch.ne(y_count, 0.0).float()); "
    "self.seen = self.seen + y_count"
}
SEEN_CLASSES = {"torch.LongTensor(": "self.cycled(batch_size, "}
STATISTICS = {"elif 'no_bn' in mode": "elif 'no_bn' == mode"}


@contextmanager
def watch(extra: dict[str, Any]) -> Iterator[None]:
    """Note the initial generator and RTNets, and all noise."""
    extra["rtnets"], extra["noise"] = {}, {}
    init, join, draw = FRAug.init, FRAug.join, FRAug.draw_noise

    def noting_init(self: Any, ctx: Any) -> Any:
        extra["generator"] = ctx.task.modules["generator"].draw_weights()
        server = init(self, ctx)
        extra["generator"] |= server["generator"]
        return server

    def noting_join(self: Any, ctx: Any) -> Any:
        state = join(self, ctx)
        extra["rtnets"][ctx.client] = state.get("rtnet")
        return state

    def noting_draw(self: Any, ctx: Any, *shape: int) -> Tensor:
        z = draw(self, ctx, *shape)
        extra["noise"].setdefault((ctx.round, ctx.client), []).append(z)
        return z

    with ExitStack() as stack:
        for name, value in (("init", noting_init), ("join", noting_join), ("draw_noise", noting_draw)):
            stack.enter_context(mock.patch.object(FRAug, name, value))
        yield


class Model(nn.Module):
    """rayfed's network under the names that their clients look for."""

    def __init__(self, trace: Trace):
        super().__init__()
        self.encoder, self.classifier = copy.deepcopy(trace.initial.features), Head(trace.initial.head)
        self.feature_dim = FEATURES

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.encoder(x))
        return logits


class Head(nn.Module):
    """A head whose batch norm, if any, takes its running statistics from real embeddings, which have gradients."""

    def __init__(self, layers: nn.Module):
        super().__init__()
        self.layers = copy.deepcopy(layers)

    def forward(self, u: Tensor) -> Tensor:
        statistics = [buffer.clone() for buffer in self.buffers()]
        logits: Tensor = self.layers(u)
        if self.training and not u.requires_grad:
            _restore(self, statistics)
        return logits


def _restore(module: nn.Module, buffers: list[Tensor]) -> None:
    for buffer, value in zip(module.buffers(), buffers, strict=True):
        buffer.data.copy_(value)  # without a new version, which backward would refuse


def run(*, mended: bool = True, statistics: bool = False) -> Callable[[Checkout, Trace], Models]:
    """Return a function that trains with their clients and server.

    Args:
        mended: Whether prototypes start at the first mean, y_c cycles over the classes seen so far, and RTNets take
            their running statistics from u before u_c.
        statistics: Whether only the statistics of batch norm stay with clients, as the name of their mode says.
    """

    def theirs(checkout: Checkout, trace: Trace) -> Models:
        report = SimpleNamespace(report=lambda **_: None)
        with checkout.importing(".", anything("datasets") | {"ray": {"tune": report}}) as load:
            federation = Federation(load, trace, mended=mended, statistics=statistics)
            for round in range(1, trace.setting.rounds + 1):
                federation.train(round)
            federation.feed.finish()
            return federation.models()

    return theirs


class Federation:
    """Their server and clients."""

    def __init__(self, load: Importer, trace: Trace, *, mended: bool, statistics: bool):
        self.trace, self.feed, self.options = trace, Feed(trace), trace.setting.algorithm
        base, module = load("servers.server_FRAug"), load("users.user_FRAug")
        user = module.UserFRAug
        user.prepare_data_loader = lambda *_: None  # `train` hands out the batches
        if mended:
            user.update_cls_mean_feature = load.mended(user.update_cls_mean_feature, FIRST_MEAN)
            user.train, user.cycled = load.mended(user.train, SEEN_CLASSES), _cycled
            module.FTNet = _later_first(module.FTNet)
        if statistics:
            base.FRAug.communicate = load.mended(base.FRAug.communicate, STATISTICS)
        self.server = base.FRAug(self.config(), Model(trace))
        self.server.G.load_state_dict(_renamed(trace.extra["generator"], GENERATOR))
        for number, client in enumerate(self.server.users):
            client.G.load_state_dict(self.server.G.state_dict())
            client.seen, client.FTNet.pairs = torch.zeros(CLASSES, 1), self.options.get("embeddings", "both") == "both"
            if self.options.get("use_rtnet", True) and number in trace.extra["rtnets"]:
                client.FTNet.load_state_dict(_renamed(trace.extra["rtnets"][number], RTNET))

    def config(self) -> dict[str, Any]:
        setting, options, clients = self.trace.setting, self.options, len(self.trace.parts)
        kinds = {"mmd": "MMD_kernel", "mse": "L2", "prototype_mse": "L2"}
        sizes = {
            "batch_size": setting.batch_size,
            "local_epochs": 0,
            "global_epochs": setting.rounds,
            "latent_dim": LATENT,
        }
        rates = {
            "lr": setting.lr,
            "lr_G": options["lr_g"],
            "lr_FTNet": options["lr_m"],
            "inter_gamma": options["gamma"],
        }
        switches = {
            "distance_metric_G": kinds[options.get("distance_g", "mmd")],
            "distance_metric_FT": kinds[options.get("distance_rt", "mmd")],
            "use_FTNet": options.get("use_rtnet", True),
            "use_homo_label_aug": {"u": 0, "uc": 1, "both": 2}[options.get("embeddings", "both")],
            "use_feature_inter": options.get("interpolate", True),
        }
        weights = {"L_G_dist_lambda": options["alpha"], "L_FT_dist_lambda": options["beta"]}
        return CONFIG | {"source_domains": [str(i) for i in range(clients)]} | sizes | rates | switches | weights

    def train(self, round: int) -> None:
        """Train the clients of a round, and average."""
        server, setting = self.server, self.trace.setting
        self.feed.start(round)
        server.selected_users = [server.users[i] for i in self.trace.cohort(round)]
        for number, user in zip(self.trace.cohort(round), server.selected_users, strict=True):
            self.download(user)
            steps = setting.epochs * (self.trace.examples(number) // setting.batch_size)
            user.num_train_samples, user.local_epochs = self.trace.examples(number), steps
            user.iter_trainloader = self.batches(user, number, steps)
            with mock.patch.object(torch, "rand", Noise(self.trace, round, number)):
                user.train(round - 1)
        with torch.no_grad():
            server.communicate(mode="no_bn_running_stats")
            server.communicate(model_name="G", mode=self.generator_mode)

    @property
    def generator_mode(self) -> str:
        return "no_local" if self.options.get("generator_bn") == "local" else "all"

    def batches(self, user: Any, number: int, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the client's batches, and keep count of the examples before each."""
        for _ in range(steps):
            x, y = self.feed.next(number)
            user.position = getattr(user, "read", 0)
            user.read = user.position + len(y)
            yield x, y

    def download(self, user: Any) -> None:
        """Give the client the weights that the server shares."""
        for module, kept in ((user.model, self.kept), (user.G, self.kept_of_generator)):
            shared = self.server.model if module is user.model else self.server.G
            weights = {name: value for name, value in shared.state_dict().items() if not kept(name)}
            module.load_state_dict(module.state_dict() | weights)

    def kept(self, name: str) -> bool:
        """Whether a weight of the model stays with clients."""
        return "bn" in name and (self.options.get("bn_mode") != "stats" or "running" in name)

    def kept_of_generator(self, name: str) -> bool:
        return self.generator_mode == "no_local" and "local" in name

    def models(self) -> Models:
        """Return everything under rayfed's names."""
        models = {
            "server": self.part(self.server.model, MODEL, self.kept, False),
            "generator": self.part(self.server.G, GENERATOR, self.kept_of_generator, False),
        }
        for i in self.trace.clients:
            user = self.server.users[i]
            models[f"client {i}"] = self.part(user.model, MODEL, self.kept, True)
            models[f"client {i} generator"] = self.part(user.G, GENERATOR, self.kept_of_generator, True)
            if self.options.get("use_rtnet", True):
                models[f"client {i} rtnet"] = numbers(plain(user.FTNet, RTNET))
            models[f"client {i} prototypes"] = {"prototypes": user.cls_mean_feature}
        return models

    @staticmethod
    def part(
        module: nn.Module, names: Mapping[str, str], kept: Callable[[str], bool], stays: bool
    ) -> dict[str, Tensor]:
        """Return the weights that stay with clients, or the others."""
        part = {name: value.detach().clone() for name, value in module.state_dict().items() if kept(name) is stays}
        return numbers(_translated(part, names))


class Noise:
    """Stands for `torch.rand`: rayfed's noise of one client in one round, in their order.

    In each step rayfed draws for u and then for u_c, and they for u_c and then for u.
    """

    def __init__(self, trace: Trace, round: int, client: int):
        options, draws = trace.setting.algorithm, trace.extra["noise"][round, client]
        order = [0, 1, 2]
        if options.get("embeddings", "both") == "both":
            order = [1, 0, 2, 4, 3] if options.get("use_rtnet", True) else [1, 0, 2]
        elif not options.get("use_rtnet", True):
            order = [0, 1]
        size = len(order)
        self.draws = iter([draws[first + i] for first in range(0, len(draws), size) for i in order])

    def __call__(self, *shape: Any, **_: Any) -> Tensor:
        return next(self.draws).clone()


def _cycled(user: Any, count: int, _: Any) -> Tensor:
    """Return the next classes of the cycle over those that the client has seen."""
    seen = user.seen[:, 0].nonzero()[:, 0]
    return seen[(user.position + torch.arange(count)) % len(seen)]


def _later_first(kind: Any) -> Any:
    """Return their RTNet with running statistics of the second of two training passes before those of the first."""

    class Ordered(kind):
        first: Any = None

        def forward(self, *inputs: Tensor) -> Tensor:
            output: Tensor
            if not self.training or not self.pairs:
                return super().forward(*inputs)
            if self.first is None:
                buffers = [buffer.clone() for buffer in self.buffers()]
                output = super().forward(*inputs)
                _restore(self, buffers)
                self.first = inputs
                return output
            output = super().forward(*inputs)
            with torch.no_grad():
                super().forward(*self.first)
            self.first = None
            return output

    return Ordered


def _renamed(weights: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """Return rayfed's weights under their names."""
    return _translated(weights, {ours: theirs for theirs, ours in names.items()})


def _translated(weights: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """Return weights with other prefixes."""
    translated = {}
    for name, value in weights.items():
        prefix = next(prefix for prefix in names if name.startswith(prefix))
        translated[names[prefix] + name.removeprefix(prefix)] = value
    return translated


def numbers(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights without the counters of batch norm."""
    return {name: value for name, value in weights.items() if value.is_floating_point()}


def ours(trace: Trace) -> Models:
    models = {"server": numbers(trace.server["weights"]), "generator": numbers(trace.server["generator"])}
    for i, state in trace.clients.items():
        models[f"client {i}"] = numbers(state["weights"])
        models[f"client {i} generator"] = numbers(state["generator"])
        if "rtnet" in state:
            models[f"client {i} rtnet"] = numbers(state["rtnet"])
        models[f"client {i} prototypes"] = {"prototypes": state["prototypes"]}
    return models


START = (
    "`user_FRAug.py`, line 61, starts prototypes at 0, so that the first mean moves them by 0.3 only (rayfed: they "
    "start at the first mean). Line 153 lets y_c cycle over all classes by the number of the round (rayfed: over those "
    "that the client has seen, by its own steps). Line 238 shows the RTNet u_c before u, on which its running "
    "statistics depend. With these three changed, they agree. Their noise is uniform, which is `noise=uniform`."
)


def cases() -> list[Case]:
    """Return all comparisons with the authors' FRAug."""
    options = {"noise": "uniform", "latent": LATENT, "momentum": MOMENTUM, "gamma": 0.4, "alpha": 0.3, "beta": 0.2}
    options |= {"lr_g": 0.03, "lr_m": 0.02}
    changed = "theirs with three changes"

    def case(variant: str, theirs: Any, differs: str = "", head: str = "linear", **more: Any) -> list[Case]:
        # A larger β or smaller batches magnify float32 rounding in the RTNet, up to 6e-3
        setting = {"network": "mlp_bn", "head": head, "batch_size": 10, "more": {"local.momentum": MOMENTUM}}
        own = options | more
        words = {"variant": variant, "differs": differs}
        return pair("fraug", SOURCE, own, theirs, ours, watch=watch, **words, **setting)

    switches: list[dict[str, Any]] = [
        {"embeddings": "u"},
        {"embeddings": "uc"},
        {"use_rtnet": False},
        {"interpolate": False, "gamma": 0.1},
        {"distance_g": "prototype_mse"},
        {"distance_rt": "mse"},
        {"generator_bn": "local"},
    ]
    found = [*case("noise=uniform", run(mended=False), START), *case(f"noise=uniform; {changed}", run())]
    found += case(f"a head of two layers; {changed}", run(), head="mlp")
    found += case(f"a head with batch norm; {changed}, and its statistics of real embeddings", run(), head="mlp_bn")
    for switch in switches:
        key, value = next(iter(switch.items()))
        found += case(f"{key}={str(value).lower()}; {changed}", run(), **switch)
    found += case(f"bn_mode=stats; {changed}, and their mode by its name", run(statistics=True), bn_mode="stats")
    return found
