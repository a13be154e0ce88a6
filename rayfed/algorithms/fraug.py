"""FRAug: Chen et al. 2023, "FRAug: Tackling Federated Learning with Non-IID Features via Representation Augmentation",
Alg. 1 and Eq. 1 to 6, with the scaling of the authors' code.

A shared generator g (ω) makes embeddings. Each client's own network m (φ), the RTNet, turns them into residuals that
are added to real embeddings. Client, in each step, on a batch (X, y):

    1. θ:  u = f(X), prototypes ū_c follow u;  û = u + λ·m(g(z, y), y),  û_c = ū_{y_c} + λ·m(g(z', y_c), y_c)
           L = (1−κ)·CE(h(u), y) + κ·½[CE(h(sg û), y) + CE(h(sg û_c), y_c)],  κ = min(½, λ),  λ = exp(γ(r−R))
    2. ω:  v = g(z, y_c);  L = CE(h(v), y_c) − α·D(v, f(X))
    3. φ:  û, û_c with λ = 1;  L = ½[−H(h(û)) − H(h(û_c))] + β·½[D(û, f(X)) + D(û_c, ū_{y_c})],  H the entropy
    server: averages θ, without the clients' batch norm, and ω; φ and ū are never sent

y_c cycles over the classes that the client has seen; rounds r count from 0. This is the authors' code, `variant=code`.
The paper prints (`variant=paper`), with sums over the classes c that the client has seen, and y in place of y_c:

    1. L = CE(h(u), y) + CE(h(sg û), y) + Σ_c CE(h(sg û_c), c);  ū_c ← (1−λ_c)·ū_c + λ_c·(mean of c in the batch),
       λ_c ← λ_c·exp(−5(1 − (r+1)/R)²), the ramp-up of Laine and Aila 2017 over the rounds; it is constant in the code
    3. with λ of the round:  L = −H(h(û)) − Σ_c H(h(û_c)) + β·[D(û, u) + Σ_c D(û_c, ū_c)]
    server: equal weights

In both variants, ū_c starts at the first mean of c and stays in batches without c, where Eq. 4 would shrink it. Table
4's networks have `conditional=false` and `module_bn=false`. A model without batch norm works too: all
of θ is averaged then. The authors' settings: PACS alpha=10 distance_rt=mse; digits distance_g=prototype_mse (unbounded
below: watch `generated_norm`) interpolate=false; OfficeHome generator_bn=local; SGD 0.01 with momentum 0.5 for θ.

The authors' code draws z from U[0, 1) (`noise=uniform`); docs/fidelity/lockstep.md has its other differences.

With `augmenter` = uniform, laplace or gaussian there is only step 1, and û is u plus plain noise of scale γ, the same
in every round. The noise baselines of table 7 augment u alone: use embeddings=u, since otherwise ū_c plus noise is û_c.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayfed.algorithm import ClientData, Context, ProblemSpec, Replies, State, Traits
from rayfed.algorithms.common.soft_labels import one_hot
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.errors import UsageError
from rayfed.core.modules import batch_norm_names, batch_norm_statistics
from rayfed.core.network import gradients, weights_of
from rayfed.core.optim import SGD
from rayfed.core.options import option
from rayfed.core.task import Batch, Task
from rayfed.core.trees import Weights, only, without
from rayfed.models.single_example_batchnorm import batch_size_advice, leaves_single_example
from rayfed.privacy import laplace_like

Anchors = Sequence[tuple[Tensor, Tensor]]
"""Real embeddings [batch, width] to augment, and their classes [batch]."""


@dataclass(frozen=True, kw_only=True)
class FRAug(FedAvg):
    name: ClassVar[str] = "fraug"
    reference: ClassVar[str] = "Chen et al. 2023, Alg. 1, Eq. 1 to 6"
    traits: ClassVar[Traits] = replace(
        FedAvg.traits,
        needs_split=True,
        supports_loss_terms=False,
        requires_hard_labels=True,
        requires_classes=True,
        default_eval_point="downloaded",
        depends_on_rounds=True,
        keeps_optimizer=True,
    )
    averaged: ClassVar[tuple[str, ...]] = ("weights", "generator")

    variant: str = option(
        "code", choices=("code", "paper"), help="losses of the authors' code, or Eq. 1 to 6 as printed"
    )

    # What is augmented, and how

    use_generator: bool = option(True, help="use the shared generator; else RTNets receive noise")
    use_rtnet: bool = option(True, help="use the clients' RTNets; else mix in the generator's output")
    embeddings: str = option("both", choices=("u", "uc", "both"), help="augments the batch, the prototypes, or both")
    interpolate: bool = option(True, help="λ = exp(γ(r−R)) grows; else λ = 1")
    gamma: float = option(0.01, low=0, help="γ of λ, for the paper's 200 rounds; adapt it to others")
    latent: int = option(256, low=1, high=65536, help="width of noise and of the RTNets' hidden layer")
    noise: str = option("normal", choices=("normal", "uniform"), help="noise z ~ N(0, I) or U[0, 1)")
    conditional: bool = option(True, help="give the class to the generator and the RTNets")
    module_bn: bool = option(True, help="batch norm in the generator and the RTNets")
    augmenter: str = option(
        "fraug", choices=("fraug", "uniform", "laplace", "gaussian"), help="makes û: the networks, or plain noise"
    )
    noise_scale: float = option(
        0.1, above=0, help="γ of plain noise: U(−γ, γ), Lap(0, γ) or N(0, γ²) on each value of u"
    )

    # Local training

    lambda_c: float = option(
        0.3, above=0, high=1, help="λ_c, rate at which prototypes follow the batches; paper: the last one"
    )
    alpha: float = option(1.0, low=0, help="α, weight of the generator's distance")
    beta: float = option(1.0, low=0, help="β, weight of the RTNets' distance")
    distance_g: str = option("mmd", choices=("mmd", "prototype_mse"), help="D of the generator's loss")
    distance_rt: str = option("mmd", choices=("mmd", "mse"), help="D of the RTNets' loss")
    lr_g: float = option(0.05, above=0, help="learning rate of the generator's SGD")
    lr_m: float = option(0.05, above=0, help="learning rate of the RTNets' SGD")
    momentum: float = option(0.5, low=0, below=1, help="momentum of the generator's and RTNets' SGD")

    # What is kept and averaged

    bn_mode: str = option("all", choices=("all", "stats"), help="kept by clients: all of batch norm, or its statistics")
    generator_bn: str = option("averaged", choices=("averaged", "local"), help="batch norm of the generator")
    weighting: str | None = option(  # type: ignore[assignment]
        None, choices=("examples", "equal"), help="weigh clients so; null: by examples, in the variant paper equally"
    )

    @property
    def generates(self) -> bool:
        """Whether there is a generator."""
        return self.use_generator and self.augmenter == "fraug"

    @property
    def transforms(self) -> bool:
        """Whether there are RTNets."""
        return self.use_rtnet and self.augmenter == "fraug"

    def check(self, problem: ProblemSpec) -> None:
        shape, size = problem.task.feature_shape, problem.batch_size
        if len(shape) != 1:
            actual = "x".join(map(str, shape))
            raise UsageError(f"algorithm.name=fraug: needs features that are vectors, the model's are {actual}")
        sizes, drop_last = problem.examples.values(), problem.drop_last
        if any(leaves_single_example(n, size, epochs=1, steps=None, drop_last=drop_last) for n in sizes):
            raise UsageError(
                f"local.batch_size={size}: algorithm.name=fraug cannot train its batch norm on a batch of one example; "
                f"{batch_size_advice(size, enough=min(sizes) > 1)}"
            )

    def modules(self, task: Task) -> dict[str, nn.Module]:
        if len(task.feature_shape) != 1:
            return {}  # `check` refuses it
        (width,), classes = task.feature_shape, task.num_classes if self.conditional else 0
        networks: dict[str, nn.Module] = {}
        if self.generates:
            networks["generator"] = Generator(self.latent, width, classes, self.module_bn)
        if self.transforms:
            networks["rtnet"] = RTNet(self.latent, width, classes, self.module_bn)
        return networks

    # State

    def personal(self, task: Task) -> frozenset[str]:
        names = batch_norm_names if self.bn_mode == "all" else batch_norm_statistics
        return task.personal_names | names(task.model.module)

    def personal_generator(self, task: Task) -> frozenset[str]:
        """Return the names of the generator's weights that stay with the client."""
        local = self.generates and self.generator_bn == "local"
        return batch_norm_names(task.modules["generator"].module) if local else frozenset()

    def init(self, ctx: Context) -> State:
        server = super().init(ctx)
        if not self.generates:
            return server
        generator = ctx.task.modules["generator"].draw_weights()
        return server | {"generator": without(generator, self.personal_generator(ctx.task))}

    def join(self, ctx: Context) -> State:
        modules, device = ctx.task.modules, ctx.task.device
        shape = (ctx.task.num_classes, *ctx.task.feature_shape)
        state: State = {
            "prototypes": torch.zeros(shape, device=device),
            "seen": torch.zeros(shape[0], dtype=torch.bool, device=device),
            "position": torch.zeros((), dtype=torch.long, device=device),  # position in the cycle over the classes
        }
        if self.generates:
            state["generator"] = only(weights_of(modules["generator"].module), self.personal_generator(ctx.task))
        if self.transforms:
            state["rtnet"] = modules["rtnet"].draw_weights()
        return super().join(ctx) | state

    # A round

    def broadcast(self, ctx: Context, server: State) -> State:
        return server

    def start(self, ctx: Context, client: State, down: State) -> State:
        work = super().start(ctx, client, down)
        work |= only(client, ("prototypes", "seen", "position", "rtnet"))
        if self.generates:
            work["generator"] = down["generator"] | client["generator"]
        for module, network in ctx.task.modules.items():
            fresh = self.module_optimizer(ctx, module).init(only(work[module], network.parameters))
            work[f"optimizer_{module}"] = client.get(f"optimizer_{module}", fresh)
        return work

    def step(self, ctx: Context, work: State, down: State, batch: Batch) -> tuple[State, dict[str, Tensor]]:
        present = one_hot(batch.y, ctx.task.num_classes).sum(0) > 0
        seen = work["seen"] | present
        first, count = (work["position"], len(batch.y)) if self.variant == "code" else (0, len(seen))
        classes = cycled_classes(seen, first, count)
        work, metrics = self.train_classifier(ctx, work, down, batch, classes, seen)
        work = work | {"seen": seen, "position": work["position"] + len(batch.y)}
        u = ctx.task.represent(work["weights"], batch.x)
        if self.generates:
            made = classes if self.variant == "code" else batch.y
            work, generator_metrics = self.train_generator(ctx, work, u, made)
            metrics |= generator_metrics
        if self.transforms:
            work, rtnet_metrics = self.train_rtnet(ctx, work, self.anchors(u, batch.y, work["prototypes"], classes))
            metrics |= rtnet_metrics
        return work, metrics

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        state, up = super().finish(ctx, work, client, down, data)
        state |= only(work, ("prototypes", "seen", "position", "rtnet"))
        if ctx.keep_optimizer:
            state |= only(work, [f"optimizer_{module}" for module in ctx.task.modules])
        if self.generates:
            names = self.personal_generator(ctx.task)
            state["generator"] = only(work["generator"], names)
            up["generator"] = without(work["generator"], names)
        return state, up

    def weight(self, ctx: Context, examples: int) -> float:
        weighting = self.weighting or ("equal" if self.variant == "paper" else "examples")
        return 1.0 if weighting == "equal" else float(examples)

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        return server | replies.mean

    # The three parts of a step

    def train_classifier(
        self, ctx: Context, work: State, down: State, batch: Batch, classes: Tensor, seen: Tensor
    ) -> tuple[State, dict[str, Tensor]]:
        """Part 1: train θ on real and augmented embeddings, and update the prototypes."""
        kappa, rate = min(0.5, self.strength(ctx)), self.prototype_rate(ctx)

        def objective(trained: Weights) -> tuple[Tensor, tuple[Weights, Tensor]]:
            weights = work["weights"] | trained
            real, output = self.loss(ctx, weights, work, down, batch)
            u = output.features.detach()  # the synthetic terms train the head only
            prototypes = update_prototypes(work["prototypes"], work["seen"], u, batch.y, rate)
            synthetic = [
                (ctx.task.head(weights, self.augmented(ctx, work, anchors, y)), y)
                for anchors, y in self.anchors(u, batch.y, prototypes, classes)
            ]
            mixed = self.combined(lambda logits, y: ctx.task.loss(logits, y, weights), synthetic, seen)
            total = (1 - kappa) * real + kappa * mixed if self.variant == "code" else real + mixed
            return total, (output.buffers, prototypes)

        weights = work["weights"]
        grads, loss, (buffers, prototypes) = gradients(objective, only(weights, self.trained(ctx)))
        ctx.optimizer.update_(weights, self.correct(ctx, grads, work, down), work["optimizer"])
        return work | {"weights": weights | buffers, "prototypes": prototypes}, {"loss": loss}

    def train_generator(self, ctx: Context, work: State, u: Tensor, classes: Tensor) -> tuple[State, dict[str, Tensor]]:
        """Part 2: train ω to make embeddings that are classified correctly and lie far from the real ones."""
        network, weights = ctx.task.modules["generator"], work["generator"]
        z = self.draw_noise(ctx, len(u), self.latent)

        def objective(trained: Weights) -> tuple[Tensor, tuple[Weights, Tensor]]:
            v, buffers = network(weights | trained, z, classes)
            error = ctx.task.loss(ctx.task.head(work["weights"], v, train=False), classes, work["weights"])
            distance = mmd(v, u) if self.distance_g == "mmd" else F.mse_loss(v, work["prototypes"][classes])
            return error - self.alpha * distance, (buffers, v.norm(dim=1).mean())

        grads, loss, (buffers, norm) = gradients(objective, only(weights, network.parameters))
        self.module_optimizer(ctx, "generator").update_(weights, grads, work["optimizer_generator"])
        return work | {"generator": weights | buffers}, {"generator_loss": loss, "generated_norm": norm}

    def train_rtnet(self, ctx: Context, work: State, anchors: Anchors) -> tuple[State, dict[str, Tensor]]:
        """Part 3: train φ to make residuals that confuse the classifier and stay near the real embeddings."""
        network, weights = ctx.task.modules["rtnet"], work["rtnet"]
        inputs = [self.generated(ctx, work, y) for _, y in anchors]
        strength = 1.0 if self.variant == "code" else self.strength(ctx)

        def term(logits: Tensor, synthetic: Tensor, real: Tensor) -> Tensor:
            distance = mmd(synthetic, real) if self.distance_rt == "mmd" else F.mse_loss(synthetic, real)
            return self.beta * distance - entropy(logits)

        def objective(trained: Weights) -> tuple[Tensor, Weights]:
            phi = weights | trained
            buffers: Weights = {}
            sets = []
            for (real, y), v in zip(anchors, inputs, strict=True):
                residual, buffers = network(phi | buffers, v, y)
                synthetic = real + strength * residual
                sets.append((ctx.task.head(work["weights"], synthetic, train=False), synthetic, real))
            return self.combined(term, sets, work["seen"]), buffers

        grads, loss, buffers = gradients(objective, only(weights, network.parameters))
        self.module_optimizer(ctx, "rtnet").update_(weights, grads, work["optimizer_rtnet"])
        return work | {"rtnet": weights | buffers}, {"rtnet_loss": loss}

    def module_optimizer(self, ctx: Context, module: str) -> SGD:
        """Return the optimiser of the generator or of the RTNet."""
        return SGD(lr=ctx.scaled(self.lr_g if module == "generator" else self.lr_m), momentum=self.momentum)

    def combined(self, term: Callable[..., Tensor], sets: Sequence[tuple[Tensor, ...]], seen: Tensor) -> Tensor:
        """Return the mean of `term` over the `sets`; in the variant paper, its sum with a term for each seen class.

        A set has the arguments of `term`, with a row per embedding, which is a class in the prototypes' set there.
        """
        if self.variant == "code":
            return torch.stack([term(*rows) for rows in sets]).mean()
        whole = [term(*sets[0])] if self.embeddings != "uc" else []
        if self.embeddings != "u":
            by_class = torch.vmap(lambda *row: term(*(value[None] for value in row)))(*sets[-1])
            first_turn = torch.arange(len(by_class), device=by_class.device) < seen.sum()
            whole.append((by_class * first_turn).sum())
        return torch.stack(whole).sum()

    # Synthetic embeddings

    def prototype_rate(self, ctx: Context) -> float:
        """Return λ_c of the round."""
        return self.lambda_c * (1.0 if self.variant == "code" else math.exp(-5 * (1 - ctx.round / ctx.rounds) ** 2))

    def strength(self, ctx: Context) -> float:
        """Return λ of the round."""
        return math.exp(self.gamma * (ctx.round - 1 - ctx.rounds)) if self.interpolate else 1.0

    def anchors(self, u: Tensor, y: Tensor, prototypes: Tensor, classes: Tensor) -> Anchors:
        """Return the embeddings to augment: those of the batch, prototypes of `classes`, or both."""
        available = {"u": (u, y), "uc": (prototypes[classes], classes)}
        return [pair for name, pair in available.items() if self.embeddings in (name, "both")]

    def draw_noise(self, ctx: Context, count: int, width: int) -> Tensor:
        """Return the generator's input z [count, width]."""
        if self.noise == "uniform":
            return torch.rand(count, width, device=ctx.task.device)
        return torch.randn(count, width, device=ctx.task.device)

    def generated(self, ctx: Context, work: State, y: Tensor) -> Tensor:
        """Return v for new noise, from the generator in evaluation mode; without a generator, noise."""
        if not self.generates:
            return self.draw_noise(ctx, len(y), *ctx.task.feature_shape)
        z = self.draw_noise(ctx, len(y), self.latent)
        return ctx.task.modules["generator"](work["generator"], z, y, train=False)[0]

    def augmented(self, ctx: Context, work: State, anchors: Tensor, y: Tensor) -> Tensor:
        """Return û as the classifier receives it."""
        if self.augmenter != "fraug":
            return anchors + self.plain_noise(anchors)
        v, strength = self.generated(ctx, work, y), self.strength(ctx)
        if not self.transforms:
            return (1 - strength) * anchors + strength * v
        return anchors + strength * ctx.task.modules["rtnet"](work["rtnet"], v, y, train=False)[0]

    def plain_noise(self, anchors: Tensor) -> Tensor:
        """Return Δu of the paper's noise baselines (table 7), in the shape of `anchors`."""
        if self.augmenter == "laplace":
            return laplace_like(anchors, self.noise_scale)
        draw = torch.randn if self.augmenter == "gaussian" else torch.rand
        noise = draw(anchors.shape, device=anchors.device)
        return self.noise_scale * (noise if self.augmenter == "gaussian" else 2 * noise - 1)


class Generator(nn.Module):
    """g(z, y): maps noise [batch, latent] and classes to client-agnostic embeddings v [batch, width], non-negative."""

    def __init__(self, latent: int, width: int, classes: int, norm: bool = True):
        super().__init__()
        self.classes, first, second = classes, _layer(latent + classes, width, norm), _layer(width, width, norm)
        self.layers = nn.Sequential(*first, nn.ReLU(), *second, nn.ReLU())

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return self.layers(torch.cat([z, one_hot(y, self.classes)], 1))


class RTNet(nn.Module):
    """m(v, y): maps embeddings [batch, width] and classes to a client's residuals [batch, width], of either sign."""

    def __init__(self, latent: int, width: int, classes: int, norm: bool = True):
        super().__init__()
        self.classes, first = classes, _layer(width + classes, latent, norm)
        self.layers = nn.Sequential(*first, nn.ReLU(), *_layer(latent, width, norm))

    def forward(self, v: Tensor, y: Tensor) -> Tensor:
        return self.layers(torch.cat([v, one_hot(y, self.classes)], 1))


def _layer(inputs: int, outputs: int, norm: bool) -> list[nn.Module]:
    return [nn.Linear(inputs, outputs), *([nn.BatchNorm1d(outputs)] if norm else [])]


def update_prototypes(prototypes: Tensor, seen: Tensor, features: Tensor, y: Tensor, rate: float) -> Tensor:
    """Return the prototypes after a batch: ū_c ← (1 − rate)·ū_c + rate·(mean of class c in the batch).

    A class that is seen for the first time starts at its mean; a class that is not in the batch stays. `prototypes` is
    [classes, width], and `seen` [classes] says which classes were seen before.
    """
    members = one_hot(y, len(prototypes))
    counts = members.sum(0)[:, None]
    means = members.T @ features / counts.clamp(min=1)
    blend = torch.where(seen[:, None], (1 - rate) * prototypes + rate * means, means)
    return torch.where(counts > 0, blend, prototypes)


def cycled_classes(seen: Tensor, position: Tensor | int, count: int) -> Tensor:
    """Return the next `count` classes of a cycle over the classes that the client has seen, from `position` on."""
    order = torch.argsort(seen.logical_not().int(), stable=True)
    turns = position + torch.arange(count, device=seen.device)
    return order[turns % seen.sum().clamp(min=1)]


def entropy(logits: Tensor) -> Tensor:
    """Return the Shannon entropy of softmax(logits) in nats, averaged over the batch."""
    log_p = logits.log_softmax(1)
    return -(log_p.exp() * log_p).sum(1).mean()


KERNELS = 5


def mmd(x: Tensor, y: Tensor) -> Tensor:
    """Return MMD² between the rows of `x` [n, d] and of `y` [m, d]."""
    points = torch.cat([x, y])
    points = points - points.mean(0).detach()  # distances stay the same, with less cancellation below
    norms = points.square().sum(1)
    distances = (norms[:, None] + norms - 2 * points @ points.T).clamp(min=0)
    count = len(points)
    bandwidth = (distances.detach().sum() / (count * (count - 1))).clamp(min=1e-12)
    bandwidths = [bandwidth * 2.0 ** (j - KERNELS // 2) for j in range(KERNELS)]
    kernel = torch.stack([(-distances / each).exp() for each in bandwidths]).sum(0)
    n = len(x)
    return kernel[:n, :n].mean() + kernel[n:, n:].mean() - 2 * kernel[:n, n:].mean()
