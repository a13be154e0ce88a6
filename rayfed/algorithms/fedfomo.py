"""FedFomo: Zhang et al. 2021, "Personalized Federated Learning with First Order Model Optimization", Eq. 3 and 6.

    client:  receives models θ_n;  F: loss on its validation part, θ_old: its model before its last local training
             w_n = (F(θ_old) − F(θ_n)) / (‖θ_n − θ_old‖ + 10⁻⁵),  w⁺_n = max(0, w_n)
             θ_i ← Σ w⁺_n θ_n / Σ w⁺_n (θ_i stays if no w_n is above 0), then local training; sends θ_i and the w_n
    server:  keeps the last model of every client and P, identity at first; P[i, n] += w_n; sends client i the M
             models of greatest P[i, ·]

Ratings below 0 count in P, so that models never tried (P = 0) come before those that were worse: the paper's random
exploration (ε) is not here, as in PFLlib. Nothing is sent before there are models. Only models that clients have sent
are candidates, the client's own among them; of equal P the lower number goes first, and to an unseen client all are equal.

An unseen client starts from the models that it is sent, as in appendix D.4 of Zhang et al. 2023 (DBE): from their mixture by
its own ratings, with the untrained model as θ_old, and from their plain mean if it rates none above 0.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from rayfed.algorithm import ClientData, Context, ProblemSpec, Replies, State
from rayfed.algorithms.common.ratings import mixed, rated
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.core.trees import Weights, only, without


@dataclass(frozen=True, kw_only=True)
class FedFomo(FedAvg):
    """Each client's model is kept and sent, to the server and from there to those who rate it best; with it go the
    ratings. Scored: the client's model as its local training left it. Distances are over what is trained and sent."""

    name: ClassVar[str] = "fedfomo"
    reference: ClassVar[str] = "Zhang et al. 2021, Eq. 3 and 6"
    averaged: ClassVar[tuple[str, ...]] = ()
    default_eval_point: ClassVar[str] = "downloaded"

    models: int = option(5, low=1, help="M, models that a client receives in a round")

    def check(self, problem: ProblemSpec) -> None:
        empty = [client for client, n in problem.validation.items() if not n]
        if empty:
            raise UsageError(
                f"algorithm.name={self.name}: clients rate models on their validation part, and client {empty[0]} has "
                "none; give every client one"
            )

    def init(self, ctx: Context) -> State:
        count = ctx.task.num_clients
        return {
            "models": [super().init(ctx)["weights"]] * count,
            "seen": torch.zeros(count, dtype=torch.bool, device=ctx.task.device),
            "ratings": torch.eye(count, device=ctx.task.device),
        }

    def join(self, ctx: Context) -> State:
        weights = ctx.task.initial_weights()
        return {"weights": weights, "old": weights}

    def broadcast(self, ctx: Context, server: State) -> State:
        return {}

    def chosen(self, server: State, client: int) -> list[int]:
        """The clients whose models `client` is sent, the best first."""
        seen = server["seen"].tolist()
        ratings = server["ratings"][client].tolist() if client < len(seen) else [0.0] * len(seen)
        known = [n for n in range(len(seen)) if seen[n]]
        return sorted(known, key=lambda n: (-ratings[n], n))[: self.models]

    def unicast(self, ctx: Context, server: State) -> State:
        models = [server["models"][n] for n in self.chosen(server, ctx.client)]
        return {"models": models} if models else {}

    def received(self, ctx: Context, client: State, down: State) -> tuple[Weights, Tensor]:
        """(the client's model with what it was sent mixed in, its ratings of what it was sent)."""
        models = down.get("models", [])
        ratings = rated(ctx, client["weights"], client["old"], models)
        lost = ctx.unseen and not (ratings > 0).any()  # nothing but the untrained model would be left to it
        return mixed(client["weights"], models, torch.ones_like(ratings) if lost else ratings), ratings

    def start(self, ctx: Context, client: State, down: State) -> State:
        weights, ratings = self.received(ctx, client, down)
        fresh = ctx.optimizer.init(only(weights, ctx.task.trainable))
        return {"weights": weights, "old": weights, "ratings": ratings, "optimizer": client.get("optimizer", fresh)}

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        kept = only(work, ("weights", "old", "optimizer") if self.keep_optimizer else ("weights", "old"))
        sent = without(work["weights"], self.personal(ctx.task))
        return client | kept, {"weights": sent, "ratings": work["ratings"]}

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        models, seen, ratings = list(server["models"]), server["seen"].clone(), server["ratings"].clone()
        for reply in replies.each:
            for n, rating in zip(self.chosen(server, reply.client), reply.up["ratings"], strict=True):
                ratings[reply.client, n] += rating
            models[reply.client], seen[reply.client] = reply.up["weights"], True
        return server | {"models": models, "seen": seen, "ratings": ratings}

    def global_model(self, ctx: Context, server: State) -> Any:
        return None

    def downloaded_model(self, ctx: Context, client: State, down: State) -> Any:
        return self.received(ctx, client, down)[0] if ctx.unseen else client["weights"]
