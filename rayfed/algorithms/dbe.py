"""DBE: Zhang et al. 2023, "Eliminating Domain Bias for Federated Learning in Representation Space", Eq. 6 to 9, Alg. 1.

A wrapper round FedAvg and its relatives: the client adds a bias of its own, z^p, to the features (PRBM), and the mean
of the features is held near one that all clients agreed upon before the first round (MR):

    L_i = ℓ(h(f(x) + z^p_i), y) + κ/2 · mean_k (m_ik − z̄^g_k)²,   m_i ← (1−μ)·sg(m_i) + μ·batch mean of f(x)
    setup:  everyone trains once from θ⁰ without z^p and without the second term and sends m_i; the mean z̄^g comes back
    round:  that of the base; z^p never leaves and takes plain SGD steps of the same length as θ; m_i starts from 0

κ and μ depend on the architecture: 50 and 1 for a small CNN (batch norm wants a small μ; 1 and 0.1 for ResNet-18 are
unconfirmed). The noise on m_i is that of FedPCL's code: (1−q)·m_i + s·N(0, I). As global model counts θ with z^p = 0.
PRBM needs a head that is trained and that predicts: over FedBABU and FedProto MR goes alone.
"""

import copy
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from rayfed.algorithm import Algorithm, Context, ProblemSpec, State
from rayfed.algorithms.common.consensus import Consensus
from rayfed.algorithms.common.dbe_model import BIAS, EXTRAS, MeanRegulariser, TwoLevels
from rayfed.algorithms.common.wrapper import derived, innermost, inside
from rayfed.algorithms.fedavg import FedAvg
from rayfed.algorithms.fedbabu import FedBABU
from rayfed.algorithms.fedproto import FedProto
from rayfed.core.errors import UsageError
from rayfed.core.network import weights_of
from rayfed.core.options import option
from rayfed.core.task import Task
from rayfed.core.trees import only


@dataclass(frozen=True, kw_only=True)
class DBE(Consensus):
    name: ClassVar[str] = "dbe"
    reference: ClassVar[str] = "Zhang et al. 2023, Alg. 1"

    kappa: float = option(50.0, low=0, help="κ, weight of the mean regulariser; 0: PRBM alone")
    mu: float = option(1.0, low=0, high=1, help="μ, momentum of the running mean; 1: each batch on its own")
    prbm: bool = option(True, help="the personal bias; without it, MR alone")
    mr: bool = option(True, help="the mean regulariser; without it, PRBM alone")

    default_eval_point = derived(
        lambda self: (
            "downloaded" if self.prbm and self.base.default_eval_point == "global" else self.base.default_eval_point
        )
    )
    regularises = derived(lambda self: self.mr and self.kappa > 0)

    def check(self, problem: ProblemSpec) -> None:
        if any(isinstance(each, DBE) for each in inside(self)):
            raise UsageError("algorithm.base=dbe: DBE cannot wrap another DBE; give it what that one wraps")
        if (self.noise_scale or self.noise_mix) and not self.regularises:
            key = "noise_scale" if self.noise_scale else "noise_mix"
            off = "kappa=0" if self.mr else "mr=false"
            raise UsageError(
                f"algorithm.{key}={getattr(self, key)}: noise is for the means of the mean regulariser, and with "
                f"algorithm.{off} nobody sends one; use algorithm.{key}=0"
            )
        base = innermost(self.base)
        if why := self._unfit(base, problem.task):
            raise UsageError(f"algorithm.base={base.name}: {why}")
        if not problem.task.feature_shape:
            raise UsageError("algorithm.name=dbe: the model needs a split point, features(x) and a module called head")
        super().check(problem)

    def _unfit(self, base: Algorithm, task: Task) -> str:
        """Why DBE would mean nothing over `base`; "" where it does mean something."""
        if not base.supports_loss_terms:
            return "DBE wraps methods that train one model by the task's loss"
        if isinstance(base, FedAvg) and set(task.trainable) <= base.personal(task) | {BIAS}:
            return "it averages nothing of the model, and DBE is about what is learned in common; choose another base"
        if self.prbm and isinstance(base, FedBABU):
            return "it never trains the head, where the personal bias is; use algorithm.prbm=false, MR alone"
        if self.prbm and isinstance(base, FedProto):
            return "it predicts in front of the head, where the personal bias is; use algorithm.prbm=false, MR alone"
        return ""

    def adapt(self, ctx: Context) -> Context:
        ctx = super().adapt(ctx)
        if not ctx.task.feature_shape:
            return ctx  # refused in `check`
        model = TwoLevels(ctx.task.model.module, bias=self.prbm, means=self.regularises)
        task = ctx.task.with_model(model, personal_names=[name for name in EXTRAS if name in weights_of(model)])
        if self.regularises:
            task = task.with_loss_term(MeanRegulariser(self.kappa, self.mu))
        return ctx.at(task=task, optimizer=replace(ctx.optimizer, plain_names=ctx.optimizer.plain_names | {BIAS}))

    def global_model(self, ctx: Context, server: State) -> Any:
        task = copy.copy(ctx.task)
        task.personal_names -= set(EXTRAS)
        model = super().global_model(ctx.at(task=task), server)
        return None if model is None else model | only(ctx.task.initial_weights(), EXTRAS)
