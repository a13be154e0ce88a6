"""DBE: Zhang et al. 2023, "Eliminating Domain Bias for Federated Learning in Representation Space", Eq. 6 to 9, Alg. 1.

A wrapper round FedAvg and its relatives: the client adds a bias of its own, z^p, to the features (PRBM), and the mean
of the features is held near one that all clients agreed upon before the first round (MR):

    L_i = ℓ(h(f(x) + z^p_i), y) + κ/2 · mean_k (m_ik − z̄^g_k)²,   m_i ← (1−μ)·sg(m_i) + μ·batch mean of f(x)
    setup:  everyone trains once from θ⁰ without z^p and without the second term and sends m_i; the mean z̄^g comes back
    round:  that of the base; z^p never leaves and takes plain SGD steps of the same length as θ; m_i starts from 0

κ and μ depend on the architecture: 50 and 1 for a small CNN, 1 and 0.1 for ResNet-18 (batch norm wants a small μ).
The noise on m_i is that of FedPCL's code: (1−q)·m_i + s·N(0, I). As global model counts θ with z^p = 0.
"""

import copy
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from rayfed.algorithm import Context, Setting, State
from rayfed.algorithms.parts.consensus import Consensus
from rayfed.algorithms.parts.two_levels import BIAS, EXTRAS, MeanRegulariser, TwoLevels
from rayfed.algorithms.parts.wrapper import derived, innermost
from rayfed.errors import UsageError
from rayfed.network import weights_of
from rayfed.options import option
from rayfed.tree import only


@dataclass(frozen=True, kw_only=True)
class DBE(Consensus):
    name: ClassVar[str] = "dbe"
    source: ClassVar[str] = "Zhang et al. 2023, Alg. 1"

    kappa: float = option(50.0, low=0, help="κ, weight of the mean regulariser; 0: PRBM alone")
    mu: float = option(1.0, low=0, high=1, help="μ, momentum of the running mean; 1: each batch on its own")
    prbm: bool = option(True, help="the personal bias; without it, MR alone")
    mr: bool = option(True, help="the mean regulariser; without it, PRBM alone")

    scored = derived(lambda self: "downloaded" if self.prbm and self.base.scored == "global" else self.base.scored)
    regularises = derived(lambda self: self.mr and self.kappa > 0)

    def check(self, setting: Setting) -> None:
        base = innermost(self.base)
        if not base.takes_terms:
            raise UsageError(f"algorithm.base={base.name}: DBE wraps methods that train one model by the task's loss")
        if not setting.task.feature_shape:
            raise UsageError("algorithm.name=dbe: the model needs a split point, features(x) and a module called head")
        super().check(setting)

    def adapt(self, ctx: Context) -> Context:
        ctx = super().adapt(ctx)
        if not ctx.task.feature_shape:
            return ctx  # refused in `check`
        model = TwoLevels(ctx.task.model.module, bias=self.prbm, means=self.regularises)
        task = ctx.task.with_model(model, personal=[name for name in EXTRAS if name in weights_of(model)])
        if self.regularises:
            task = task.with_term(MeanRegulariser(self.kappa, self.mu))
        return ctx.at(task=task, optimizer=replace(ctx.optimizer, plain=ctx.optimizer.plain | {BIAS}))

    def global_model(self, ctx: Context, server: State) -> Any:
        task = copy.copy(ctx.task)
        task.personal -= set(EXTRAS)
        model = super().global_model(ctx.at(task=task), server)
        return None if model is None else model | only(ctx.task.initial_weights(), EXTRAS)
