"""FedFomo: Zhang et al. 2021, "Personalized Federated Learning with First Order Model Optimization", Eq. 3 and 6.

    client:  receives models θ_n;  F: loss on examples held out for it, θ_old: its model before its last local training
             w_n = (F(θ_old) − F(θ_n)) / (‖θ_n − θ_old‖ + 10⁻⁵),  w⁺_n = max(0, w_n)
             θ_i ← Σ w⁺_n θ_n / Σ w⁺_n (θ_i stays if no w_n is above 0), then local training; sends θ_i and the w_n
    server:  keeps the last model of every client, and P, initially the identity; P[i, n] += w_n;
             sends client i the M models with the greatest P[i, ·]

P includes ratings below 0, so that models never tried (P = 0) come before those that were worse. As in PFLlib, the
paper's random exploration (ε) is not implemented. Candidates are the models that clients have sent so far, the client's
own among them; nothing is sent while there are none. Equal P are ordered by client index. To an unseen client all
candidates have equal P. The norm ‖·‖ is Euclidean, over all trained and sent weights, as in PFLlib.

The examples that rate models are a share of the training part, on which the client does not train. PFLlib does the
same, and so does the authors' split of 0.6, 0.2 and 0.2. Validation data that rated the models would be scored too high
(by three points where this was measured).

An unseen client starts from the mixture of the models that it receives by its ratings. The untrained model is its
θ_old. If it rates none above 0, it starts from their plain mean.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rayfed.algorithm import ClientData, Context, Finished, Replies, State, mean_loss
from rayfed.algorithms.fedavg import LocalTraining
from rayfed.core.options import option
from rayfed.core.trees import Weights, finite_mean, is_counter, norm, only, sub, without


@dataclass(frozen=True, kw_only=True)
class FedFomo(LocalTraining):
    """The client's model after local training is scored."""

    name = "fedfomo"
    reference = "Zhang et al. 2021, Eq. 3 and 6"
    averaged = ()
    traits = replace(LocalTraining.traits, default_eval_point="downloaded")

    models: int = option(
        5,
        low=1,
        help="M, models sent to a client per round",
        elsewhere={"authors": "5 or 10, the client's own among them", "PFLlib": "5"},
    )
    rating_share: float = option(
        0.2,
        above=0,
        below=1,
        help="share of training examples that only rate models",
        elsewhere={"authors": "0.2", "PFLlib": "0.2"},
    )

    @property
    def held_out_share(self) -> float:
        return self.rating_share

    def init(self, ctx: Context) -> State:
        clients = ctx.task.num_clients
        model = super().init(ctx)["weights"]
        device = ctx.task.device
        seen = torch.zeros(clients, dtype=torch.bool, device=device)
        ratings = torch.eye(clients, device=device)
        return {"models": [model] * clients, "seen": seen, "ratings": ratings}

    def join(self, ctx: Context) -> State:
        weights = ctx.task.initial_weights()
        return {"weights": weights, "old": weights}

    def broadcast(self, ctx: Context, server: State) -> State:
        return {}

    def best_rated(self, server: State, client: int) -> list[int]:
        """Return the clients that send their models to `client`, the best first."""
        seen = server["seen"].tolist()
        ratings = [0.0] * len(seen)
        if client < len(seen):
            ratings = server["ratings"][client].tolist()
        candidates = [n for n, is_seen in enumerate(seen) if is_seen]
        candidates.sort(key=lambda n: (-ratings[n], n))
        return candidates[: self.models]

    def unicast(self, ctx: Context, server: State) -> State:
        best = self.best_rated(server, ctx.client)
        models = [server["models"][n] for n in best]
        if not models:
            return {}
        return {"models": models}

    def mix_received(self, ctx: Context, client: State, down: State) -> tuple[Weights, Tensor]:
        """Return the client's model after mixing in the models received, and its ratings of them [models]."""
        models = down.get("models", [])
        ratings = rate(ctx, client["weights"], client["old"], models)
        factors = ratings
        if ctx.unseen and not (ratings > 0).any():
            factors = torch.ones_like(ratings)  # otherwise it would keep the untrained model
        return mixture(client["weights"], models, factors), ratings

    def start(self, ctx: Context, client: State, down: State) -> State:
        weights, ratings = self.mix_received(ctx, client, down)
        fresh = ctx.optimizer.init(only(weights, ctx.task.trainable))
        return {"weights": weights, "old": weights, "ratings": ratings, "optimizer": client.get("optimizer", fresh)}

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> Finished:
        kept = client | only(work, ("weights", "old"))
        if ctx.keep_optimizer:
            kept["optimizer"] = work["optimizer"]
        sent = without(work["weights"], self.personal(ctx.task))
        return kept, {"weights": sent, "ratings": work["ratings"]}

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        models = list(server["models"])
        seen = server["seen"].clone()
        ratings = server["ratings"].clone()
        for reply in replies.each:
            client = reply.client
            for n, rating in zip(self.best_rated(server, client), reply.up["ratings"], strict=True):
                ratings[client, n] += rating
            models[client] = reply.up["weights"]
            seen[client] = True
        return server | {"models": models, "seen": seen, "ratings": ratings}

    def global_model(self, ctx: Context, server: State) -> Any:
        return None

    def downloaded_model(self, ctx: Context, client: State, down: State) -> Any:
        if not ctx.unseen:
            return client["weights"]
        model, _ = self.mix_received(ctx, client, down)
        return model


def rate(ctx: Context, weights: Weights, old: Weights, models: Sequence[Weights]) -> Tensor:
    """Return the ratings w_n [models]: the gain of each model over `old` on the examples held out, per distance.

    Args:
        weights: The client's model, which supplies the weights that are not sent.
        old: The client's model before its last local training.
        models: The models received.
    """
    ratings = torch.zeros(len(models), device=ctx.task.device)
    if not models:
        return ratings
    old_loss = mean_loss(ctx, old, ctx.data.held_out)
    for n, model in enumerate(models):
        gain = old_loss - mean_loss(ctx, weights | model, ctx.data.held_out)
        trained = only(model, ctx.task.trainable)
        distance = norm(sub(trained, old))
        ratings[n] = gain / (distance + 1e-5)
    return ratings


def mixture(weights: Weights, models: Sequence[Weights], ratings: Tensor) -> Weights:
    """Return `weights` with the mean of `models`, weighted by max(0, `ratings`), in the place of the weights they have.

    If no rating is above 0, `weights` is returned unchanged. Integer buffers stay those of `weights`.
    """
    shares = ratings.clamp(min=0)
    if not shares.any():
        return weights
    shares = shares / shares.sum()
    mixed = dict(weights)
    for name, first in models[0].items():
        if not is_counter(first):
            values = torch.stack([model[name] for model in models])
            mean = torch.einsum("n,n...->...", shares.to(first.dtype), values)
            mixed[name] = finite_mean(mean, values)
    return mixed
