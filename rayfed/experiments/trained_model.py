"""The trained model of a simulation as a module: the user's own, or the one that the configuration names."""

import sys
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_model
from torch import Tensor, nn

from rayfed.algorithm import Context, State
from rayfed.core.errors import UsageError
from rayfed.core.ids import ClientIndex, Moment
from rayfed.core.modules import copied, recompute
from rayfed.core.rng import global_state_kept, one_at_a_time
from rayfed.core.trees import only, without
from rayfed.data.standardise import Standardise
from rayfed.engine.evaluation import downloads, participants_of
from rayfed.experiments.plan import Plan
from rayfed.experiments.plan_model import ModelFactory, fresh_module, names_by_id, prepared, renamed


class KeptState(Protocol):
    """The state of a simulation after a round: in a checkpoint, or under way.

    Attributes:
        round: The round.
        clients: The states of clients by their id.
    """

    round: int
    clients: Mapping[int, State]

    def server(self) -> State: ...


@one_at_a_time
def trained_model(
    plan: Plan, state: KeptState, given: ModelFactory | nn.Module | None, client: int | None
) -> nn.Module:
    """Return a new module, in evaluation mode and on the CPU, with trained weights.

    Args:
        plan: The simulation.
        state: Its state after some round.
        given: The model that the user gave in Python. The result has its names of layers and weights.
        client: The id of the client whose model to return, as it is after a download; None: the server's model.

    Raises:
        UsageError: There is no such model or client, the state is gone, or the model is more than one network.
    """
    with global_state_kept():
        ctx = plan.blueprint.context(plan.population, "cpu")
        participants = participants_of(plan.population)
        ctx = ctx.at(Moment("round", min(state.round, ctx.rounds)), cohort=participants)
        if client is None:
            weights = _global(plan, ctx, state)
        else:
            weights = _of_client(plan, ctx, state, client)
        if not isinstance(weights, Mapping):
            raise _not_one_network(plan, type(weights).__name__)
        if not all(isinstance(value, Tensor) for value in weights.values()):
            raise _not_one_network(plan, ", ".join(weights))
        module = _with_weights(plan, ctx, given, without(dict(weights), ctx.task.loss_names))
    recompute(module.eval())
    if plan.population.standardisation is None:
        return module
    return nn.Sequential(OrderedDict(standardise=_layer(plan, client), model=module)).eval()


def _layer(plan: Plan, client: int | None) -> Standardise:
    """Return the layer that standardises inputs as those on which the model was trained."""
    standardisation = plan.population.standardisation
    assert standardisation is not None, "the plan has one"
    if client is not None:
        clients = plan.population.clients
        return standardisation.of(int(clients.numbers[clients.place(client)]))
    if standardisation.kind == "client":
        raise UsageError(
            "Result.model(): data.standardize=client standardises each client's inputs by its own; give client=, such "
            "as Result.model(client=0)"
        )
    return standardisation.of(None)


def _with_weights(
    plan: Plan, ctx: Context, given: ModelFactory | nn.Module | None, weights: dict[str, Tensor]
) -> nn.Module:
    """Return the user's model with `weights`, or the model of the task where the algorithm added layers."""
    names = set(_tensors(plan.blueprint.model))
    if set(weights) <= names:
        constants = only(ctx.task.model.constants, names)
        return _users(plan, given, constants | weights)
    if set(weights) <= set(_tensors(ctx.task.model.module)):
        return _filled(copied(ctx.task.model.module), weights)
    extra = sorted(set(weights) - names)
    raise _not_one_network(plan, f"the weights of the model, and {', '.join(extra[:3])}")


def save_module(module: nn.Module, folder: Path) -> None:
    """Write the weights of a module, and the adapters of PEFT in it, to `folder`; see `Result.save`."""
    folder.mkdir(parents=True, exist_ok=True)
    save_model(module, str(folder / "model.safetensors"))
    peft = sys.modules.get("peft")
    if peft is None:
        return  # nothing in the module can be of PEFT
    for name, part in module.named_modules():
        if isinstance(part, peft.PeftModel):
            part.save_pretrained(str(folder / name))


def _global(plan: Plan, ctx: Context, state: KeptState) -> Any:
    model = plan.blueprint.algorithm.global_model(ctx, state.server())
    if model is None:
        raise UsageError(
            f"Result.model(): algorithm {plan.config.algorithm_name} has no global model here, since parts of the "
            "model stay with the clients; give client=, such as Result.model(client=0)"
        )
    return model


def _of_client(plan: Plan, ctx: Context, state: KeptState, client: int) -> Any:
    algorithm = plan.blueprint.algorithm
    index = ClientIndex(plan.population.clients.place(client))
    ctx = plan.blueprint.client_context(ctx, plan.population, index)
    if client in state.clients:
        own = state.clients[client]
    else:
        plan.blueprint.streams.begin("join", client=index)
        own = algorithm.join(ctx)
    alone = ctx.at(cohort=(index,))
    down, unicast = downloads(algorithm.round_exchanges[0], alone, state.server())
    return algorithm.downloaded_model(ctx, own, down | unicast.get(index, {}))


def _not_one_network(plan: Plan, parts: str) -> UsageError:
    return UsageError(
        f"Result.model(): the model of {plan.config.algorithm_name} is more than one network ({parts}); Result.server "
        "and Result.clients have its parts"
    )


def _users(plan: Plan, given: ModelFactory | nn.Module | None, weights: Mapping[str, Tensor]) -> nn.Module:
    """Return the model of the plan with `weights`; a module that the user gave keeps its names."""
    if given is None:
        return _filled(copied(plan.blueprint.model), weights)
    shape = plan.population.shape
    layout = plan.population.layout
    module = fresh_module(given, shape, plan.input_type, layout)
    twin = fresh_module(given, shape, plan.input_type, layout)
    if layout is not None:
        layout.attach(twin)
    before = names_by_id(twin)
    own_names = renamed(before, prepared(plan.config, twin, shape, plan.input_type))
    return _filled(module, {own_names[name]: value for name, value in weights.items()})


def _filled(module: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    tensors = _tensors(module)
    with torch.no_grad():
        for name, value in weights.items():
            if tensors[name].shape != value.shape:  # HarmoFL's amplitude, before its setup
                tensors[name].data = torch.empty_like(value)
            tensors[name].copy_(value)
    return module


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module by name. Tied tensors appear once, under their first name."""
    return dict(module.named_parameters()) | dict(module.named_buffers())
