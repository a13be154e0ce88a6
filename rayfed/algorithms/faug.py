"""FAug: Jeong et al. 2018, "Communication-Efficient On-Device Machine Learning: Federated Distillation and Augmentation
under Non-IID Private Data", section 3 (federated augmentation), with FedAvg in the place of distillation.

    setup:   every client sends a few of its examples of each class, the seeds: raw data, and nothing else of it
             the server trains a conditional generator G on all seeds and sends G and a list of their classes to all
             client i makes m examples with G, each of the listed class of which it has fewest by then, and keeps them
    client:  SGD on its n_i examples and the m made ones: each step takes a batch of the former, a few of the latter,
             L = [n_i · CE(own) + m · CE(made)] / (n_i + m), of one pass of the network over both
    server:  FedAvg with weights n_i + m

The paper's server first enlarges the seeds by a web search for pictures like them, which is not possible here, and its
G is a conditional GAN's. There is no GAN here: G is the decoder of a conditional variational autoencoder (Sohn, Lee and
Yan 2015), whose training on few seeds needs no balance between two networks. Numbers are those of a variant, then, and
not of the paper's method. Epochs are counted in the client's own examples.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from rayfed.algorithm import ClientData, Context, Exchange, ProblemSpec, Replies, State
from rayfed.algorithms.common.conditional_vae import Decoder, Encoder, trained_decoder
from rayfed.algorithms.common.seed_inputs import drawn_seeds, levelled
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.core.task import Batch, Output, Task
from rayfed.core.trees import Weights, only


@dataclass(frozen=True, kw_only=True)
class FAug(FedAvg):
    """FAug with a conditional VAE in the place of the paper's conditional GAN. Sends seeds once, then weights; gets the
    generator and its classes once, and keeps what it made. Scored: the global model."""

    name: ClassVar[str] = "faug"
    reference: ClassVar[str] = "Jeong et al. 2018, section 3 (FAug), with a VAE for its GAN"

    seeds: int = option(5, low=1, help="examples of each class that a client sends to the server")
    made: int = option(200, low=1, high=1_000_000, help="m, generated examples that a client adds to its own")
    made_batch: int = option(10, low=1, high=65536, help="generated examples beside each batch of the client's own")
    noise: int = option(16, low=1, high=65536, help="width of the generator's noise")
    hidden: int = option(256, low=1, high=65536, help="width of the hidden layers of the generator and of its encoder")
    server_lr: float = option(1e-3, above=0, help="learning rate of the Adam that trains the generator")
    server_steps: int = option(500, low=1, help="steps of the generator's training, which is done once")
    server_batch_size: int = option(64, low=1, high=65536, help="seeds in a step of it")

    def check(self, problem: ProblemSpec) -> None:
        if not problem.task.inputs.continuous:
            raise UsageError(f"algorithm.name={self.name}: generates inputs, and this data's are numbers of words")

    def modules(self, task: Task) -> dict[str, nn.Module]:
        form = (self.noise, self.hidden, task.num_classes, task.inputs.shape)
        return {"encoder": Encoder(*form), "decoder": Decoder(*form)}

    def init(self, ctx: Context) -> State:
        none = torch.zeros(ctx.task.num_classes, dtype=torch.bool, device=ctx.task.device)
        return super().init(ctx) | {"generator": ctx.task.modules["decoder"].draw_weights(), "seeded": none}

    @property
    def setup_exchanges(self) -> Sequence[Exchange]:
        return TrainGenerator(self), SendGenerator(self)

    def start(self, ctx: Context, client: State, down: State) -> State:
        share = torch.tensor(self.made / (ctx.examples + self.made), device=ctx.task.device)
        order = torch.randperm(self.made).to(ctx.task.device)
        return super().start(ctx, client, down) | {"made": client["made"], "order": order, "share": share}

    def loss(self, ctx: Context, weights: Weights, work: State, down: State, batch: Batch) -> tuple[Tensor, Output]:
        place = torch.arange(self.made_batch, device=batch.x.device) + ctx.step * self.made_batch
        rows, count = work["order"][place % self.made], len(batch.x)
        output = ctx.task.forward(weights, torch.cat([batch.x, work["made"]["x"][rows]]))
        own = ctx.task.loss(output.logits[:count], batch.y)
        made = ctx.task.loss(output.logits[count:], work["made"]["y"][rows])
        return ctx.task.add_loss_terms((1 - work["share"]) * own + work["share"] * made, weights, output)

    def weight(self, ctx: Context, examples: int) -> float:
        return float(examples + self.made)


@dataclass(frozen=True)
class TrainGenerator(Exchange):
    """Setup: every client sends examples of each class, and the server trains the generator on them."""

    method: FAug

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        return client, {"seeds": drawn_seeds(data.train, self.method.seeds)}

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        method = self.method
        x, y = (torch.cat([r.up["seeds"][name] for r in replies.each]).to(ctx.task.device) for name in ("x", "y"))
        generator = trained_decoder(
            ctx,
            server["generator"],
            x,
            y,
            noise=method.noise,
            lr=method.server_lr,
            steps=method.server_steps,
            batch_size=method.server_batch_size,
        )
        return server | {"generator": generator, "seeded": torch.bincount(y, minlength=ctx.task.num_classes) > 0}


@dataclass(frozen=True)
class SendGenerator(Exchange):
    """Setup: every client receives the generator, balances its classes with generated examples and keeps them."""

    method: FAug

    def broadcast(self, ctx: Context, server: State) -> State:
        return only(server, ("generator", "seeded"))

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        method = self.method
        y = levelled(torch.bincount(data.train.y, minlength=ctx.task.num_classes), method.made, down["seeded"])
        noise = torch.randn(method.made, method.noise, device=y.device)
        with torch.no_grad():
            x = ctx.task.modules["decoder"](down["generator"], noise, y)[0]
        return client | {"made": {"x": x, "y": y}}, {}
