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

With `augmenter` = uniform, laplace or gaussian there is only step 1. Then û is u plus plain noise, of the same scale γ
in every round. The noise baselines of table 7 augment u alone: use embeddings=u, since otherwise ū_c plus noise is û_c.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayfed.algorithm import ClientData, Context, Finished, ProblemSpec, Replies, State, Stepped
from rayfed.algorithms.common.networks import ConditionalNetwork
from rayfed.algorithms.common.soft_labels import one_hot
from rayfed.algorithms.fedavg import FedAvg
from rayfed.channel.mechanisms import laplace_like
from rayfed.core.errors import UsageError
from rayfed.core.modules import batch_norm_names, batch_norm_statistics
from rayfed.core.network import gradients, weights_of
from rayfed.core.optim import SGD
from rayfed.core.options import option
from rayfed.core.task import Batch, Task
from rayfed.core.trees import Weights, only, without
from rayfed.models.single_example_batchnorm import batch_size_advice, leaves_single_example

Anchors = Sequence[tuple[Tensor, Tensor]]
"""Real embeddings [batch, width] to augment, and their classes [batch]."""
KEPT = ("prototypes", "seen", "position", "rtnet")
"""The fields that clients keep from round to round besides weights."""


@dataclass(frozen=True, kw_only=True)
class FRAug(FedAvg):
    name = "fraug"
    reference = "Chen et al. 2023, Alg. 1, Eq. 1 to 6"
    traits = replace(
        FedAvg.traits,
        needs_split=True,
        supports_loss_terms=False,
        requires_hard_labels=True,
        requires_classes=True,
        default_eval_point="downloaded",
        depends_on_rounds=True,
        keeps_optimizer=True,
    )
    averaged = ("weights", "generator")

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
        shape = problem.task.feature_shape
        if len(shape) != 1:
            actual = "x".join(map(str, shape))
            raise UsageError(f"algorithm.name=fraug: needs features that are vectors, the model's are {actual}")
        size = problem.batch_size
        sizes = problem.examples.values()
        for n in sizes:
            if leaves_single_example(n, size, epochs=1, steps=None, drop_last=problem.drop_last):
                raise UsageError(
                    f"local.batch_size={size}: algorithm.name=fraug cannot train its batch norm on a batch of one "
                    f"example; {batch_size_advice(size, enough=min(sizes) > 1)}"
                )

    def modules(self, task: Task) -> dict[str, nn.Module]:
        if len(task.feature_shape) != 1:
            return {}  # `check` refuses it
        (width,) = task.feature_shape
        classes = task.num_classes if self.conditional else 0
        networks: dict[str, nn.Module] = {}
        if self.generates:
            networks["generator"] = Generator(self.latent, width, classes, self.module_bn)
        if self.transforms:
            networks["rtnet"] = RTNet(self.latent, width, classes, self.module_bn)
        return networks

    # State

    def personal(self, task: Task) -> frozenset[str]:
        names = batch_norm_names if self.bn_mode == "all" else batch_norm_statistics
        kept = names(task.model.module)
        return task.personal_names | kept

    def personal_generator(self, task: Task) -> frozenset[str]:
        """Return the names of the generator's weights that stay with the client."""
        if self.generates and self.generator_bn == "local":
            return batch_norm_names(task.modules["generator"].module)
        return frozenset()

    def init(self, ctx: Context) -> State:
        server = super().init(ctx)
        if self.generates:
            generator = ctx.task.modules["generator"].draw_weights()
            server["generator"] = without(generator, self.personal_generator(ctx.task))
        return server

    def join(self, ctx: Context) -> State:
        classes = ctx.task.num_classes
        modules = ctx.task.modules
        client = super().join(ctx)
        device = ctx.task.device
        client["prototypes"] = torch.zeros((classes, *ctx.task.feature_shape), device=device)
        client["seen"] = torch.zeros(classes, dtype=torch.bool, device=device)
        # the position in the cycle over the classes
        client["position"] = torch.zeros((), dtype=torch.long, device=device)
        if self.generates:
            generator = weights_of(modules["generator"].module)
            client["generator"] = only(generator, self.personal_generator(ctx.task))
        if self.transforms:
            client["rtnet"] = modules["rtnet"].draw_weights()
        return client

    # A round

    def broadcast(self, ctx: Context, server: State) -> State:
        return server

    def start(self, ctx: Context, client: State, down: State) -> State:
        work = super().start(ctx, client, down)
        work |= only(client, KEPT)
        if self.generates:
            work["generator"] = down["generator"] | client["generator"]
        for module, network in ctx.task.modules.items():
            trained = only(work[module], network.parameters)
            fresh = self.module_optimizer(ctx, module).init(trained)
            work[f"optimizer_{module}"] = client.get(f"optimizer_{module}", fresh)
        return work

    def step(self, ctx: Context, work: State, down: State, batch: Batch) -> Stepped:
        counts = one_hot(batch.y, ctx.task.num_classes).sum(0)
        seen = work["seen"] | (counts > 0)
        if self.variant == "code":
            classes = cycled_classes(seen, work["position"], len(batch.y))
            generated_classes = classes
        else:
            classes = cycled_classes(seen, 0, len(seen))
            generated_classes = batch.y

        work, metrics = self.train_classifier(ctx, work, down, batch, classes, seen)
        work = work | {"seen": seen, "position": work["position"] + len(batch.y)}
        u = ctx.task.represent(work["weights"], batch.x)
        if self.generates:
            work, generator_metrics = self.train_generator(ctx, work, u, generated_classes)
            metrics |= generator_metrics
        if self.transforms:
            anchors = self.anchors(u, batch.y, work["prototypes"], classes)
            work, rtnet_metrics = self.train_rtnet(ctx, work, anchors)
            metrics |= rtnet_metrics
        return work, metrics

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> Finished:
        kept, up = super().finish(ctx, work, client, down, data)
        kept |= only(work, KEPT)
        if ctx.keep_optimizer:
            kept |= only(work, [f"optimizer_{module}" for module in ctx.task.modules])
        if self.generates:
            personal = self.personal_generator(ctx.task)
            kept["generator"] = only(work["generator"], personal)
            up["generator"] = without(work["generator"], personal)
        return kept, up

    def weight(self, ctx: Context, examples: int) -> float:
        equally = self.weighting == "equal"
        if self.weighting is None:
            equally = self.variant == "paper"
        return 1.0 if equally else float(examples)

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        return server | replies.mean

    # The three parts of a step

    def train_classifier(
        self, ctx: Context, work: State, down: State, batch: Batch, classes: Tensor, seen: Tensor
    ) -> Stepped:
        """Part 1: train θ on real and augmented embeddings, and update the prototypes."""
        kappa = min(0.5, self.strength(ctx))
        rate = self.prototype_rate(ctx)

        def objective(trained: Weights) -> tuple[Tensor, tuple[Weights, Tensor]]:
            weights = work["weights"] | trained

            def error(logits: Tensor, y: Tensor) -> Tensor:
                return ctx.task.loss(logits, y, weights)

            real, output = self.loss(ctx, weights, work, down, batch)
            u = output.features.detach()  # the synthetic terms train the head only
            prototypes = update_prototypes(work["prototypes"], work["seen"], u, batch.y, rate)
            sets = []
            for anchors, y in self.anchors(u, batch.y, prototypes, classes):
                augmented = self.augmented(ctx, work, anchors, y)
                logits = ctx.task.head(weights, augmented)
                sets.append((logits, y))
            synthetic = self.combined(error, sets, seen)
            loss = real + synthetic
            if self.variant == "code":
                loss = (1 - kappa) * real + kappa * synthetic
            return loss, (output.buffers, prototypes)

        weights = work["weights"]
        trained = only(weights, self.trained(ctx))
        grads, loss, (buffers, prototypes) = gradients(objective, trained)
        grads = self.correct(ctx, grads, work, down)
        ctx.optimizer.update_(weights, grads, work["optimizer"])
        return work | {"weights": weights | buffers, "prototypes": prototypes}, {"loss": loss}

    def train_generator(self, ctx: Context, work: State, u: Tensor, classes: Tensor) -> Stepped:
        """Part 2: train ω to make embeddings that are classified correctly and lie far from the real ones."""
        network = ctx.task.modules["generator"]
        weights = work["generator"]
        z = self.draw_noise(ctx, len(u), self.latent)

        def objective(trained: Weights) -> tuple[Tensor, tuple[Weights, Tensor]]:
            v, buffers = network(weights | trained, z, classes)
            logits = ctx.task.head(work["weights"], v, train=False)
            error = ctx.task.loss(logits, classes, work["weights"])
            if self.distance_g == "mmd":
                distance = mmd(v, u)
            else:
                distance = F.mse_loss(v, work["prototypes"][classes])
            norm = v.norm(dim=1).mean()
            return error - self.alpha * distance, (buffers, norm)

        grads, loss, (buffers, norm) = gradients(objective, only(weights, network.parameters))
        optimizer = self.module_optimizer(ctx, "generator")
        optimizer.update_(weights, grads, work["optimizer_generator"])
        return work | {"generator": weights | buffers}, {"generator_loss": loss, "generated_norm": norm}

    def train_rtnet(self, ctx: Context, work: State, anchors: Anchors) -> Stepped:
        """Part 3: train φ to make residuals that confuse the classifier and stay near the real embeddings."""
        network = ctx.task.modules["rtnet"]
        weights = work["rtnet"]
        inputs = [self.generated(ctx, work, y) for _, y in anchors]
        strength = 1.0
        if self.variant == "paper":
            strength = self.strength(ctx)

        def term(logits: Tensor, synthetic: Tensor, real: Tensor) -> Tensor:
            distance = mmd if self.distance_rt == "mmd" else F.mse_loss
            return self.beta * distance(synthetic, real) - entropy(logits)

        def objective(trained: Weights) -> tuple[Tensor, Weights]:
            phi = weights | trained
            buffers: Weights = {}
            sets = []
            for (real, y), v in zip(anchors, inputs, strict=True):
                residual, buffers = network(phi | buffers, v, y)
                synthetic = real + strength * residual
                logits = ctx.task.head(work["weights"], synthetic, train=False)
                sets.append((logits, synthetic, real))
            return self.combined(term, sets, work["seen"]), buffers

        grads, loss, buffers = gradients(objective, only(weights, network.parameters))
        optimizer = self.module_optimizer(ctx, "rtnet")
        optimizer.update_(weights, grads, work["optimizer_rtnet"])
        return work | {"rtnet": weights | buffers}, {"rtnet_loss": loss}

    def module_optimizer(self, ctx: Context, module: str) -> SGD:
        """Return the optimiser of the generator or of the RTNet."""
        lr = self.lr_g if module == "generator" else self.lr_m
        return SGD(lr=ctx.scaled(lr), momentum=self.momentum)

    def combined(self, term: Callable[..., Tensor], sets: Sequence[tuple[Tensor, ...]], seen: Tensor) -> Tensor:
        """Return the mean of `term` over the `sets`; in the variant paper, its sum with a term for each seen class.

        A set has the arguments of `term`, with a row per embedding, which is a class in the prototypes' set there.
        """
        if self.variant == "code":
            terms = [term(*rows) for rows in sets]
            return torch.stack(terms).mean()

        def of_row(*values: Tensor) -> Tensor:
            rows = [value[None] for value in values]
            return term(*rows)

        terms = []
        if self.embeddings != "uc":
            terms.append(term(*sets[0]))
        if self.embeddings != "u":
            of_classes = torch.vmap(of_row)(*sets[-1])
            first_turn = torch.arange(len(of_classes), device=of_classes.device) < seen.sum()
            terms.append((of_classes * first_turn).sum())
        return torch.stack(terms).sum()

    # Synthetic embeddings

    def prototype_rate(self, ctx: Context) -> float:
        """Return λ_c of the round."""
        if self.variant == "code":
            return self.lambda_c
        left = 1 - ctx.round / ctx.rounds
        return self.lambda_c * math.exp(-5 * left**2)

    def strength(self, ctx: Context) -> float:
        """Return λ of the round."""
        if not self.interpolate:
            return 1.0
        r = ctx.round - 1
        return math.exp(self.gamma * (r - ctx.rounds))

    def anchors(self, u: Tensor, y: Tensor, prototypes: Tensor, classes: Tensor) -> Anchors:
        """Return the embeddings to augment: those of the batch, prototypes of `classes`, or both."""
        anchors = []
        if self.embeddings in ("u", "both"):
            anchors.append((u, y))
        if self.embeddings in ("uc", "both"):
            anchors.append((prototypes[classes], classes))
        return anchors

    def draw_noise(self, ctx: Context, count: int, width: int) -> Tensor:
        """Return the generator's input z [count, width]."""
        device = ctx.task.device
        if self.noise == "uniform":
            return torch.rand(count, width, device=device)
        return torch.randn(count, width, device=device)

    def generated(self, ctx: Context, work: State, y: Tensor) -> Tensor:
        """Return v for new noise, from the generator in evaluation mode; without a generator, noise."""
        if not self.generates:
            return self.draw_noise(ctx, len(y), *ctx.task.feature_shape)
        z = self.draw_noise(ctx, len(y), self.latent)
        network = ctx.task.modules["generator"]
        v, _ = network(work["generator"], z, y, train=False)
        return v

    def augmented(self, ctx: Context, work: State, anchors: Tensor, y: Tensor) -> Tensor:
        """Return û as the classifier receives it."""
        if self.augmenter != "fraug":
            return anchors + self.plain_noise(anchors)
        v = self.generated(ctx, work, y)
        strength = self.strength(ctx)
        if not self.transforms:
            return (1 - strength) * anchors + strength * v
        network = ctx.task.modules["rtnet"]
        residual, _ = network(work["rtnet"], v, y, train=False)
        return anchors + strength * residual

    def plain_noise(self, anchors: Tensor) -> Tensor:
        """Return Δu of the paper's noise baselines (table 7), in the shape of `anchors`."""
        if self.augmenter == "laplace":
            return laplace_like(anchors, self.noise_scale)
        if self.augmenter == "gaussian":
            return self.noise_scale * torch.randn(anchors.shape, device=anchors.device)
        noise = torch.rand(anchors.shape, device=anchors.device)
        return self.noise_scale * (2 * noise - 1)


class Generator(ConditionalNetwork):
    """g(z, y): maps noise [batch, latent] and classes to client-agnostic embeddings v [batch, width], non-negative."""

    def __init__(self, latent: int, width: int, classes: int, norm: bool = True):
        first = _layer(latent + classes, width, norm)
        second = _layer(width, width, norm)
        super().__init__(classes, nn.Sequential(*first, nn.ReLU(), *second, nn.ReLU()))


class RTNet(ConditionalNetwork):
    """m(v, y): maps embeddings [batch, width] and classes to a client's residuals [batch, width], of either sign."""

    def __init__(self, latent: int, width: int, classes: int, norm: bool = True):
        first = _layer(width + classes, latent, norm)
        second = _layer(latent, width, norm)
        super().__init__(classes, nn.Sequential(*first, nn.ReLU(), *second))


def _layer(inputs: int, outputs: int, norm: bool) -> list[nn.Module]:
    layers: list[nn.Module] = [nn.Linear(inputs, outputs)]
    if norm:
        layers.append(nn.BatchNorm1d(outputs))
    return layers


def update_prototypes(prototypes: Tensor, seen: Tensor, features: Tensor, y: Tensor, rate: float) -> Tensor:
    """Return the prototypes after a batch: ū_c ← (1 − rate)·ū_c + rate·(mean of class c in the batch).

    A class that is seen for the first time starts at its mean; a class that is not in the batch stays. `prototypes` is
    [classes, width], and `seen` [classes] says which classes were seen before.
    """
    members = one_hot(y, len(prototypes))
    counts = members.sum(0)[:, None]
    means = members.T @ features / counts.clamp(min=1)
    moved = (1 - rate) * prototypes + rate * means
    of_batch = torch.where(seen[:, None], moved, means)
    return torch.where(counts > 0, of_batch, prototypes)


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
    products = points @ points.T
    distances = norms[:, None] + norms - 2 * products
    distances = distances.clamp(min=0)
    pairs = len(points) * (len(points) - 1)
    bandwidth = (distances.detach().sum() / pairs).clamp(min=1e-12)
    kernels = []
    for j in range(KERNELS):
        factor = 2.0 ** (j - KERNELS // 2)
        kernels.append((-distances / (bandwidth * factor)).exp())
    kernel = torch.stack(kernels).sum(0)
    n = len(x)
    of_x = kernel[:n, :n].mean()
    of_y = kernel[n:, n:].mean()
    of_both = kernel[:n, n:].mean()
    return of_x + of_y - 2 * of_both
