"""DBE: Zhang et al. 2023, "Eliminating Domain Bias for Federated Learning in Representation Space", Eq. 6 to 9, Alg. 1.

DBE wraps FedAvg or a relative. The client adds its own bias z^p to the features (personalized representation bias
memory, PRBM). A regulariser holds the mean of the features near a consensus from before the first round (mean
regularization, MR):

    L_i = ℓ(h(f(x) + z^p_i), y) + κ/2 · mean_k (m_ik − z̄^g_k)²,   m_i ← (1−μ)·sg(m_i) + μ·(batch mean of f(x))
    setup:  every client trains once from θ⁰ without z^p and without MR and sends m_i; z̄^g = Σ_i n_i m_i / Σ_i n_i
            is sent to every client; nothing else of this training is kept
    round:  that of the base; z^p is never sent and takes plain SGD steps of the same length as θ; m_i starts from 0

κ and μ depend on the architecture: 50 and 1 for a small CNN. Batch norm needs a small μ; 1 and 0.1 for ResNet-18 are
unconfirmed. They depend on the data as well, by their product. On Fashion-MNIST, κμ from 1 to 5 is 4 points better than
50 (docs/fidelity/experiments.md). Choose κ by validation. The noise on m_i is that of FedPCL's code: (1−q)·m_i + s·N(0,
I). The global model is θ with z^p = 0. PRBM needs a trained head that makes the predictions, so only MR works with
FedBABU and FedProto. Unseen clients receive the consensus, and their means are not collected.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rayfed.algorithm import (
    Algorithm,
    ClientData,
    Context,
    Delegate,
    Exchange,
    Finished,
    HandOut,
    Phase,
    Privacy,
    ProblemSpec,
    Replies,
    State,
    Stepped,
    Traits,
    represent,
)
from rayfed.algorithms.common.networks import WrappedModel
from rayfed.algorithms.common.wrapper import Wrapper, innermost, wrapped_algorithms
from rayfed.algorithms.ditto import PERSONAL
from rayfed.algorithms.fedavg import LocalTraining
from rayfed.algorithms.fedproto import FedProto
from rayfed.algorithms.personal_heads import FedBABU
from rayfed.core.errors import UsageError
from rayfed.core.network import weights_of
from rayfed.core.options import option
from rayfed.core.task import Batch, LossTerm, Output, Task
from rayfed.core.trees import Weights, only, without

BIAS = "dbe.bias"
MEAN = "dbe.mean"
CONSENSUS = "dbe.consensus"
DBE_WEIGHTS = (BIAS, MEAN, CONSENSUS)


@dataclass(frozen=True, kw_only=True)
class DBE(Wrapper):
    """The client's model is scored, with its bias if there is one."""

    name = "dbe"
    reference = "Zhang et al. 2023, Alg. 1"

    kappa: float = option(50.0, low=0, help="κ, weight of the mean regulariser; 0 leaves PRBM alone")
    mu: float = option(1.0, low=0, high=1, help="μ, momentum of the running mean; 1: each batch's mean")
    prbm: bool = option(True, help="add the personal bias (PRBM)")
    mr: bool = option(True, help="add the mean regulariser (MR)")
    init_mean: str = option(
        "running", choices=("running", "full"), help="which mean is sent: the running one, or that of all data"
    )
    noise_scale: float = option(0.0, low=0, help="s, standard deviation of noise on the mean sent")
    noise_mix: float = option(0.0, low=0, high=1, help="q, share of the mean removed before noise is added")

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        traits = replace(super().traits, needs_split=True)
        if self.prbm and traits.default_eval_point == "global":
            traits = replace(traits, default_eval_point="downloaded")
        return traits

    @property
    def regularises(self) -> bool:
        """Whether the mean regulariser is in use."""
        return self.mr and self.kappa > 0

    # Exchanges

    @property
    def setup_exchanges(self) -> Sequence[Exchange]:
        exchanges = list(super().setup_exchanges)
        if self.regularises:
            exchanges.append(CollectMeans(self.base.round_exchanges[0], self))
            exchanges.append(HandOut(("consensus",), CONSENSUS))
        return exchanges

    def wrapped(self, exchange: Exchange) -> Exchange:
        if self.regularises:
            return RegularisedExchange(exchange)
        return exchange

    # Model and loss

    def adapt(self, ctx: Context) -> Context:
        ctx = super().adapt(ctx)
        if not ctx.task.feature_shape:
            return ctx  # `check` refuses it
        model = BiasedModel(ctx.task.model.module, bias=self.prbm, means=self.regularises)
        added = [name for name in DBE_WEIGHTS if name in weights_of(model)]
        task = ctx.task.with_model(model, personal_names=added)
        if self.regularises:
            task = task.with_loss_term(MeanRegulariser(self.kappa, self.mu))
        optimizer = ctx.optimizer
        optimizer = replace(optimizer, plain_names=optimizer.plain_names | {BIAS})
        return ctx.at(task=task, optimizer=optimizer)

    def global_model(self, ctx: Context, server: State) -> Any:
        task = copy.copy(ctx.task)
        task.personal_names -= set(DBE_WEIGHTS)
        model = super().global_model(ctx.at(task=task), server)
        if model is None:
            return None
        return model | only(ctx.task.initial_weights(), DBE_WEIGHTS)

    def privacy_spent(self, ctx: Context, server: State) -> Privacy | None:
        """Return None if means are sent: no guarantee of the base covers them."""
        if self.regularises:
            return None
        return super().privacy_spent(ctx, server)

    # Refusals

    def check(self, problem: ProblemSpec) -> None:
        for each in wrapped_algorithms(self):
            if isinstance(each, DBE):
                raise UsageError("algorithm.base=dbe: DBE cannot wrap another DBE; give it what that one wraps")
        if not self.regularises:
            self._refuse_noise("noise_scale")
            self._refuse_noise("noise_mix")
        base = innermost(self.base)
        reason = self._why_not(base, problem.task)
        if reason:
            raise UsageError(f"algorithm.base={base.name}: {reason}")
        super().check(problem)

    def _refuse_noise(self, key: str) -> None:
        """Raise UsageError if there is noise on means that no client sends."""
        value = getattr(self, key)
        if value:
            off = "kappa=0" if self.mr else "mr=false"
            raise UsageError(
                f"algorithm.{key}={value}: noise is added to the means of the mean regulariser, and with "
                f"algorithm.{off} no client sends one; use algorithm.{key}=0"
            )

    def _why_not(self, base: Algorithm, task: Task) -> str:
        """Return why DBE cannot wrap `base`; empty if it can."""
        if not base.traits.supports_loss_terms:
            return "DBE wraps methods that train one model by the task's loss"
        if isinstance(base, LocalTraining) and set(task.trainable) <= base.personal(task) | {BIAS}:
            return "it averages nothing of the model, and DBE is about what clients learn together; use another base"
        if self.prbm and isinstance(base, FedBABU):
            return "it never trains the head, where the personal bias is; use algorithm.prbm=false, MR alone"
        if self.prbm and isinstance(base, FedProto):
            return "it predicts before the head, where the personal bias is; use algorithm.prbm=false, MR alone"
        return ""


@dataclass(frozen=True)
class RegularisedExchange(Delegate):
    """An exchange of the base with the mean regulariser.

    The running mean starts anew in each round. Training of a personal model beside the one that is sent is not
    regularised.
    """

    def broadcast(self, ctx: Context, server: State) -> State:
        of_base = without(server, ("consensus",))
        return super().broadcast(ctx, of_base)

    def start(self, ctx: Context, client: State, down: State) -> State:
        if ctx.exchange == 0:
            client = restarted(client)
        return super().start(ctx, client, down)

    def step(self, ctx: Context, work: State, down: State, batch: Batch) -> Stepped:
        if ctx.phase == PERSONAL:
            ctx = ctx.at(task=tracking_only(ctx.task))
        return super().step(ctx, work, down, batch)


@dataclass(frozen=True)
class CollectMeans(Delegate):
    """Setup: every client trains as in a round without bias and regulariser, and sends its mean."""

    method: DBE

    @property
    def averaged(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("mean",)

    @property
    def server_side_weighting(self) -> bool:
        return False

    def weight(self, ctx: Context, examples: int) -> float:
        return float(examples)

    def broadcast(self, ctx: Context, server: State) -> State:
        return super().broadcast(unbiased(ctx), server)

    def unicast(self, ctx: Context, server: State) -> State:
        return super().unicast(unbiased(ctx), server)

    def phases(self, ctx: Context) -> Sequence[Phase]:
        if ctx.unseen:
            return ()
        return super().phases(unbiased(ctx))

    def start(self, ctx: Context, client: State, down: State) -> State:
        return super().start(unbiased(ctx), restarted(client), down)

    def step(self, ctx: Context, work: State, down: State, batch: Batch) -> Stepped:
        return super().step(unbiased(ctx), work, down, batch)

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> Finished:
        dbe = self.method
        mean = work["weights"][MEAN]
        if dbe.init_mean == "full":
            mean = represent(ctx, work["weights"], data.train).mean(0)
        noise = torch.randn_like(mean)
        mean = (1 - dbe.noise_mix) * mean + dbe.noise_scale * noise
        return client, {"mean": mean}

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        return server | {"consensus": replies.mean["mean"]}


def restarted(client: State) -> State:
    """Return the client's state with a running mean of 0."""
    weights: dict[str, Any] = client["weights"]
    zeros = torch.zeros_like(weights[MEAN])
    return client | {"weights": weights | {MEAN: zeros}}


def unbiased(ctx: Context) -> Context:
    """Return the context of training without the bias and without the regulariser, as in a round's first exchange."""
    task = tracking_only(ctx.task)
    task.trainable = tuple(name for name in task.trainable if name != BIAS)
    return ctx.at(task=task, exchange=0)


class BiasedModel(WrappedModel):
    """A model with a trainable bias that is added to the features before the head.

    `features` returns the representation z^g, and `head` adds the personal bias z^p.

    Args:
        bias: Whether there is a personal bias (PRBM).
        means: Whether there are buffers for the running mean and the consensus (MR).
    """

    dbe: Any

    def __init__(self, model: Any, *, bias: bool, means: bool):
        extra = nn.Module()
        parameter = None
        if bias:
            parameter = nn.Parameter(torch.zeros(model.feature_shape))
        extra.register_parameter("bias", parameter)
        if means:
            extra.register_buffer("mean", torch.zeros(model.feature_shape))
            extra.register_buffer("consensus", torch.zeros(model.feature_shape))
        super().__init__(model, "dbe", extra)

    def head(self, features: Tensor) -> Tensor:
        if self.dbe.bias is not None:
            features = (features + self.dbe.bias).to(self.feature_dtype)
        return self.model.head(features)


@dataclass(frozen=True)
class MeanRegulariser:
    """The loss term κ/2 · mean((m − z̄^g)²), which also updates the running mean m ← (1−μ)·m + μ·(batch mean of f(x)).

    The gradient flows through the batch mean only, since the old m is a buffer.
    """

    kappa: float
    mu: float

    def __call__(self, loss: Tensor, weights: Weights, output: Output) -> tuple[Tensor, Output]:
        of_batch = output.features.mean(0)
        mean = (1 - self.mu) * weights[MEAN] + self.mu * of_batch
        if self.kappa:
            distance = mean - weights[CONSENSUS]
            loss = loss + self.kappa / 2 * distance.square().mean()
        buffers = output.buffers | {MEAN: mean.detach()}
        return loss, output._replace(buffers=buffers)


def tracking_only(task: Task) -> Task:
    """Return `task` with a regulariser that updates the running mean but adds nothing to the loss."""
    terms: list[LossTerm] = []
    for term in task.loss_terms:
        if isinstance(term, MeanRegulariser):
            term = replace(term, kappa=0.0)
        terms.append(term)
    task = copy.copy(task)
    task.loss_terms = tuple(terms)
    return task
