"""FedDebias: Guo, Tang and Lin 2022, "FedDebias: Reducing the Local Learning Bias Improves Federated Learning on
Heterogeneous Data", Eq. 2, 3, 5, Alg. 1 and 2.

All clients also train on the same pseudo-data D_p. The feature extractor is φ, and φ_g as received; the classifier is
ω. Only the contrast uses a projector P, with the weights θ.

    s⁺ = cos(Pφ(x_p), Pφ_g(x_p)),  s⁻ = cos(Pφ(x_p), Pφ(x)),  L_con = softplus(τ2 s⁻ − τ1 s⁺)
    client, each step:  max step  θ ← θ + η ∇L_con
                        min step  (φ, ω) ← (φ, ω) − η ∇[CE(x, y) + λ CE(x_p, 1/C) + μ L_con]
    server:             means of φ, ω, θ, weighted by n_i as in Eq. 1; Alg. 1 has equal weights (`weighting=equal`)

Pseudo-examples are means of examples, so that no single example leaves its client.

Where the paper is ambiguous: Eq. 5 divides by τ, but its ablations with τ2 = 0 require a multiplication, as above
(`tau_mode`). The negative pair is printed as φ(x_p) with itself; the text and Eq. 6 mean φ(x_p) with φ(x). Pairs are
formed by index: x_j with row j mod |D_p| of D_p. The mean in λ CE is over all of D_p.

Pseudo-data passes through the network separately from x and, like x, in training mode. It does so in φ and in φ_g, so
that both normalise in the same way. Before the first step s⁺ is therefore 1, unless the network is itself random
(dropout, or stochastic depth as in CCT), since φ and φ_g draw separately. Only x updates the running statistics of
batch norm.

Transfer of D_p (random sample means, RSM): for each mean, the server draws the client that computes it. In the setup
all clients send their means. With `transfer=once` they then receive D_p and keep it. With `each_round`, D_p is sent
with every model, and the round's clients send, with their models, the means that form D_p in the next round.

With `pseudo=mixture`, D_p consists of means of a public proxy dataset, computed by the server. In every step clients
mix each of them with K of their own examples. Then x̃_p = (x_p + Σ x_k)/(K+1) replaces x_p, also in φ_g, and ỹ_p = (1/C
+ Σ y_k)/(K+1) replaces 1/C. Because x̃_p then contains local data, P receives φ(x̃_p) − ⟨ỹ_p, y⟩ φ(x) in s⁻ (Eq. 6).
With K = 0 nothing is mixed or corrected.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayfed.algorithm import (
    ClientData,
    Context,
    Exchange,
    Finished,
    HandOut,
    ProblemSpec,
    Replies,
    State,
    Stepped,
)
from rayfed.algorithms.common.networks import mlp, with_projection
from rayfed.algorithms.common.soft_labels import check_real_inputs, soft
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.errors import UsageError
from rayfed.core.network import gradients
from rayfed.core.options import option
from rayfed.core.task import Batch, InputSpec, Output, Task
from rayfed.core.trees import Weights, only

NOISE, PHOTOGRAPHS = "noise", "photographs"
PATCHES = 1000
"""The number of patches that are cut from the photographs."""


@dataclass(frozen=True, kw_only=True)
class FedDebias(FedAvg):
    name = "feddebias"
    reference = "Guo, Tang and Lin 2022, Alg. 1 and 2"
    traits = replace(
        FedAvg.traits, computes_with_inputs=True, needs_split=True, supports_loss_terms=False, requires_classes=True
    )
    averaged = ("weights", "projector")

    # Pseudo-data

    pseudo: str = option("rsm", choices=("rsm", "mixture"), help="means of clients' images, or of a proxy dataset")
    pseudo_samples: int | None = option(None, low=1, high=65536, help="|D_p|; null: the batch size")
    rsm_images: int = option(10, low=1, high=10_000, help="images per mean")
    transfer: str = option("each_round", choices=("each_round", "once"), help="how often clients receive pseudo-data")
    proxy: str = option("photographs", help="proxy of mixture: photographs (scikit-learn's two), noise, or a data.name")
    k_mix: int = option(1, low=0, high=1000, help="mixture: K, local examples per pseudo-example")

    # Component 1: uniform labels on pseudo-data

    lam: float = option(1.0, low=0, help="λ, weight of the uniform labels; 0: component 2 alone")

    # Component 2: the contrast

    mu: float = option(0.5, low=0, help="μ, weight of the contrast; 0: component 1 alone")
    tau1: float = option(2.0, low=0, help="τ1, temperature of local with global features of pseudo-data")
    tau2: float = option(2.0, low=0, help="τ2, temperature of pseudo-data with local data")
    tau_mode: str = option(
        "multiply", choices=("multiply", "divide"), help="whether τ multiplies or divides similarities"
    )
    projector: bool = option(True, help="contrast projected features; else features, without a max step")
    max_step: bool = option(True, help="train the projector; else θ stays as drawn")
    widths: list[int] = option([256, 256, 128], low=1, high=65536, help="widths of the projector's layers")
    projector_in_extractor: bool = option(
        False, help="append an MLP of `widths` to the extractor, without a max step (Fig. 5a)"
    )

    @property
    def uses_pseudo_data(self) -> bool:
        """Whether a component that needs pseudo-data is switched on."""
        return bool(self.lam or self.mu)

    @property
    def mixes(self) -> bool:
        """Whether clients mix pseudo-data with their own."""
        return self.pseudo == "mixture" and self.k_mix > 0 and self.uses_pseudo_data

    @property
    def projects(self) -> bool:
        """Whether there is a projector beside the model."""
        return bool(self.mu) and self.projector and not self.projector_in_extractor

    @property
    def ascends(self) -> bool:
        """Whether there is a max step."""
        return self.projects and self.max_step

    def check(self, problem: ProblemSpec) -> None:
        check_real_inputs(problem, self.name)
        if self.pseudo == "mixture":
            check_proxy(self.proxy, problem.task.inputs)

    def adapt(self, ctx: Context) -> Context:
        if self.projector_in_extractor:
            return ctx.at(task=with_projection(ctx.task, self.widths))
        return ctx

    def modules(self, task: Task) -> dict[str, nn.Module]:
        if not self.projects:
            return {}
        width = math.prod(task.feature_shape)
        return {"projector": mlp([width, *self.widths])}

    # Before the first round: θ and D_p

    def init(self, ctx: Context) -> State:
        server = super().init(ctx)
        if self.projects:
            server["projector"] = ctx.task.modules["projector"].draw_weights()
        if self.uses_pseudo_data:
            server["pseudo"] = torch.zeros(0, device=ctx.task.device)
            if self.pseudo == "mixture":
                server["pseudo"] = self.from_proxy(ctx)
        return server

    def pseudo_count(self, ctx: Context) -> int:
        """Return |D_p|."""
        return ctx.batch_size if self.pseudo_samples is None else self.pseudo_samples

    def from_proxy(self, ctx: Context) -> Tensor:
        """Return new pseudo-data of the proxy [|D_p|, *shape]."""
        means = proxy_means(self.proxy, ctx.task.inputs, self.pseudo_count(ctx), self.rsm_images)
        return means.to(ctx.task.device)

    def owners(self, ctx: Context) -> State:
        """Return the clients that send the means of the next pseudo-data, newly drawn from the cohort."""
        if self.pseudo != "rsm":
            return {}
        return {"owners": draw_owners(ctx.cohort, self.pseudo_count(ctx))}

    def means(self, ctx: Context, down: State, data: ClientData) -> State:
        """Return the means that the server has asked this client for."""
        if "owners" not in down:
            return {}
        count = int((down["owners"] == ctx.client).sum())
        if not count:
            return {}
        return {"means": sample_means(data.train, count, self.rsm_images)}

    @property
    def setup_exchanges(self) -> Sequence[Exchange]:
        exchanges: list[Exchange] = []
        if self.uses_pseudo_data and self.pseudo == "rsm":
            exchanges.append(CollectMeans(self))
        if self.uses_pseudo_data and self.transfer == "once":
            exchanges.append(HandOut(("pseudo",)))
        return exchanges

    # A round: the server sends φ, ω, θ and perhaps D_p

    def broadcast(self, ctx: Context, server: State) -> State:
        down = only(server, self.averaged)
        if self.uses_pseudo_data and self.transfer == "each_round":
            down |= self.owners(ctx) | {"pseudo": server["pseudo"]}
        return down

    def start(self, ctx: Context, client: State, down: State) -> State:
        work = super().start(ctx, client, down)
        if self.uses_pseudo_data:
            source = down if "pseudo" in down else client
            work["pseudo"] = source["pseudo"]
        if self.projects:
            work["projector"] = down["projector"]
        if self.ascends:
            fresh = ctx.optimizer.init(down["projector"])
            work["projector_optimizer"] = client.get("projector_optimizer", fresh)
        if self.mu and self.mixes:
            work["received_weights"] = work["weights"]
        elif self.mu:
            with torch.no_grad():
                work["received_features"] = ctx.task.forward(work["weights"], work["pseudo"]).features
        return work

    # Local training: a max step and a min step on each batch

    def step(self, ctx: Context, work: State, down: State, batch: Batch) -> Stepped:
        of_step = work
        if self.mixes:
            of_step = work | self.mixed(ctx, work, batch)
        if self.ascends:
            self.ascend(ctx, of_step, batch)
        trained, metrics = super().step(ctx, of_step, down, batch)
        if self.mixes:
            trained = only(trained, work) | {"pseudo": work["pseudo"]}
        return trained, metrics

    def contrast(self, ctx: Context, work: State, theta: Weights, pseudo: Tensor, local: Tensor) -> Tensor:
        """Return L_con (Eq. 5 and 6), a scalar, for φ(x_p) [|D_p|, ...] and φ(x) [batch, ...] under the projector θ."""

        def projected(features: Tensor) -> Tensor:
            if not self.projects:
                return features
            vectors, _ = ctx.task.modules["projector"](theta, features)
            return vectors

        rows = paired_rows(len(local), len(pseudo), local.device)
        of_pseudo = pseudo[rows].flatten(1)
        of_received = work["received_features"][rows].flatten(1)
        of_local = local.flatten(1)
        p_pseudo = projected(of_pseudo)
        p_received = projected(of_received)
        p_local = projected(of_local)
        positive = F.cosine_similarity(p_pseudo, p_received)
        if "overlap" in work:  # mixtures are corrected by ⟨ỹ_p, y⟩ of each pair
            p_pseudo = projected(of_pseudo - work["overlap"][:, None] * of_local)
        negative = F.cosine_similarity(p_pseudo, p_local)
        if self.tau_mode == "divide":
            difference = negative / self.tau2 - positive / self.tau1
        else:
            difference = self.tau2 * negative - self.tau1 * positive
        return F.softplus(difference).mean()

    def ascend(self, ctx: Context, work: State, batch: Batch) -> None:
        """Take the max step θ ← θ + η ∇L_con, on `work["projector"]` in place."""
        with torch.no_grad():
            pseudo = ctx.task.forward(work["weights"], work["pseudo"]).features
            local = ctx.task.forward(work["weights"], batch.x).features

        def negated(theta: Weights) -> tuple[Tensor, Weights]:
            return -self.contrast(ctx, work, theta, pseudo, local), {}

        grads, _, _ = gradients(negated, work["projector"])
        ctx.optimizer.update_(work["projector"], grads, work["projector_optimizer"])

    def mixed(self, ctx: Context, work: State, batch: Batch) -> State:
        """Return the mixtures of this step in place of the pseudo-data, their labels, and ⟨ỹ_p, y⟩ of every pair."""
        x_p, y_p = mixture(work["pseudo"], batch, self.k_mix, ctx.task)
        rows = paired_rows(len(batch.x), len(x_p), x_p.device)
        y = soft(batch.y, ctx.task)
        overlap = (y_p[rows] * y).sum(1)
        mixtures: State = {"pseudo": x_p, "labels": y_p, "overlap": overlap}
        if self.mu:
            with torch.no_grad():
                mixtures["received_features"] = ctx.task.forward(work["received_weights"], x_p).features
        return mixtures

    def loss(self, ctx: Context, weights: Weights, work: State, down: State, batch: Batch) -> tuple[Tensor, Output]:
        """Return the loss of the min step."""
        loss, output = super().loss(ctx, weights, work, down, batch)
        if not self.uses_pseudo_data:
            return loss, output
        pseudo = ctx.task.forward(weights, work["pseudo"])  # its buffers are dropped
        if self.lam:
            classes = pseudo.logits.shape[1]
            uniform = torch.full_like(pseudo.logits, 1 / classes)
            labels = work.get("labels", uniform)
            loss = loss + self.lam * F.cross_entropy(pseudo.logits, labels)
        if self.mu:
            theta = work.get("projector", {})
            contrast = self.contrast(ctx, work, theta, pseudo.features, output.features)
            loss = loss + self.mu * contrast
        return loss, output

    # The clients send φ, ω, θ and the means that they were asked for; the server averages and pools

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> Finished:
        kept, up = super().finish(ctx, work, client, down, data)
        up |= self.means(ctx, down, data)
        if self.ascends:
            up["projector"] = work["projector"]
        if self.ascends and ctx.keep_optimizer:
            kept["projector_optimizer"] = work["projector_optimizer"]
        return kept, up

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        server = pooled(ctx, server, replies) | only(replies.mean, self.averaged)
        if self.uses_pseudo_data and self.transfer == "each_round" and self.pseudo == "mixture":
            server["pseudo"] = self.from_proxy(ctx)
        return server


# Pseudo-data: means of the clients' examples


def pooled(ctx: Context, server: State, replies: Replies) -> State:
    """Return the server's state with pseudo-data that consists of the means that clients sent, if there are any."""
    means = [reply.up["means"] for reply in replies.each if "means" in reply.up]
    if not means:
        return server
    return server | {"pseudo": torch.cat(means).to(ctx.task.device)}


@dataclass(frozen=True)
class CollectMeans(Exchange):
    """Setup: the clients send the means that form the first pseudo-data."""

    method: FedDebias

    def broadcast(self, ctx: Context, server: State) -> State:
        return self.method.owners(ctx)

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> Finished:
        return client, self.method.means(ctx, down, data)

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        return pooled(ctx, server, replies)


def draw_owners(cohort: tuple[int, ...], count: int) -> Tensor:
    """Draw the client of `cohort` that computes each of `count` means, uniformly with torch's generator."""
    clients = torch.tensor(cohort, dtype=torch.int32)
    return clients[torch.randint(len(cohort), (count,))]


def sample_means(part: Any, count: int, size: int) -> Tensor:
    """Return `count` means [count, *shape], each of `size` random examples of `part`, or of all if it has fewer."""
    size = min(size, len(part))
    rows = random_groups(len(part), count, size)
    means = [batch.x.mean(0) for batch in part.batches(size, rows)]
    return torch.stack(means)


def random_groups(total: int, count: int, size: int) -> Tensor:
    """Return the rows of `count` groups, one after the other, each `size` of `total` rows without replacement."""
    groups = [torch.randperm(total)[:size] for _ in range(count)]
    return torch.cat(groups)


def paired_rows(examples: int, pseudo_examples: int, device: torch.device) -> Tensor:
    """Return the row of the pseudo-example with which each of `examples` local examples is compared."""
    return torch.arange(examples, device=device) % pseudo_examples


# Mixtures of local examples with means of a proxy dataset


def mixture(proxy: Tensor, batch: Batch, examples: int, task: Task) -> Batch:
    """Average each row of `proxy` [n, ...] with `examples` examples of the batch, and 1/C with their labels (Eq. 4).

    As batches are in random order, row j of `proxy` takes the rows after j of the batch. After its last row comes row
    0.
    """
    first = torch.arange(len(proxy), device=proxy.device)
    offsets = torch.arange(1, examples + 1, device=proxy.device)
    rows = (first[:, None] + offsets) % len(batch.x)
    labels = soft(batch.y, task)
    x = proxy + batch.x[rows].sum(1)
    y = 1 / task.num_outputs + labels[rows].sum(1)
    return Batch(x / (examples + 1), y / (examples + 1))


def check_proxy(name: str, inputs: InputSpec) -> None:
    """Raise UsageError if the proxy is unknown, or if it consists of images and the clients' data does not."""
    if name == NOISE:
        return
    if len(inputs.shape) != 3:
        raise UsageError(
            f"algorithm.proxy={name}: this proxy consists of images, and the clients' data does not; use "
            "algorithm.proxy=noise"
        )
    if name != PHOTOGRAPHS:
        _dataset(name)


def proxy_means(name: str, inputs: InputSpec, count: int, size: int) -> Tensor:
    """Return `count` normalised means [count, *shape] of `size` random examples each, drawn with torch's generator."""
    if name == NOISE:
        return torch.randn(count, size, *inputs.shape).mean(1)
    images = _images(name, inputs.shape)
    rows = random_groups(len(images), count, size)
    groups = images[rows].view(count, -1, *inputs.shape)
    means = groups.mean(1)
    mean = torch.tensor(inputs.mean).view(-1, 1, 1)
    std = torch.tensor(inputs.std).view(-1, 1, 1)
    return (means - mean) / std


@functools.lru_cache(maxsize=2)
def _images(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return the proxy's images as floats in [0, 1], with the size and the number of channels of `shape`.

    Images with another number of channels become grey, repeated for each channel.
    """
    pixels = _patches(shape[1:]) if name == PHOTOGRAPHS else _dataset(name).load().images
    images = torch.from_numpy(pixels).float() / 255
    if images.shape[1] != shape[0]:
        grey = images.mean(1, keepdim=True)
        images = grey.expand(-1, shape[0], -1, -1)
    if images.shape[2:] != shape[1:]:
        images = F.interpolate(images, shape[1:], mode="bilinear", antialias=True)
    return images.contiguous()


def _patches(sides: tuple[int, ...]) -> np.ndarray:
    """Return patches of scikit-learn's two photographs, with twice the given sides: uint8 [n, 3, height, width]."""
    from sklearn.datasets import load_sample_images  # imported here because it takes a second

    rng = np.random.Generator(np.random.PCG64(0))
    photographs = load_sample_images().images
    most_height, most_width, _ = photographs[0].shape
    height = min(2 * sides[0], most_height)
    width = min(2 * sides[1], most_width)
    patches = []
    for index in range(PATCHES):
        image = photographs[index % 2]
        top = rng.integers(image.shape[0] - height + 1)
        left = rng.integers(image.shape[1] - width + 1)
        patch = image[top : top + height, left : left + width]
        patches.append(patch)
    return np.stack(patches).transpose(0, 3, 1, 2).copy()


def _dataset(name: str) -> Any:
    """Return a dataset with its default options; it is not loaded."""
    from rayfed.data.loading import build_data  # imported here because few runs need a dataset as proxy

    dataset, _ = build_data(name)
    return dataset
