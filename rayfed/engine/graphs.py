"""Steps of local training replayed from CUDA graphs, where that gives the same numbers.

Launching the kernels of a small step one by one takes ten times as long as the kernels; a graph launches them at once.
It repeats them on the same memory, with the same numbers from Python. So inputs are copied into its memory, and so is
the learning rate where a schedule changes it. A step that reads other changing numbers, draws random ones or waits for
the GPU runs by itself. What cannot be seen, such as a global variable, is found by its effect: steps are compared with
their replays from time to time.
"""

import functools
import logging
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rayfed.algorithm import Context, Exchange, State
from rayfed.core.errors import error_line
from rayfed.core.task import Batch
from rayfed.core.trees import as_real, clone, named_tensors, tree_map
from rayfed.engine.purity import ImpureHook

Result = tuple[State, dict[str, Tensor]]
Step = Callable[[Context, State, State, Batch], Result]
"""The step of a client, as `Exchange.step`, or that of a block of clients."""


class Rates(NamedTuple):
    """The learning rate of the optimiser, and the schedule's factor: scalars."""

    lr: Tensor
    factor: Tensor


Capture = Callable[[Callable[[], Any]], tuple[Callable[[], object], Any]]
"""Takes a function, and returns one that repeats its kernels, and its result, which each repetition overwrites."""

ENOUGH_STEPS = 20
"""Steps of a kind that a host takes before it captures one, which takes as long as several of them."""
CHECK_AFTER = 100
"""Replays after which a step is taken beside one and compared again, and again when they are twice as many."""
REPLAYED = "replayed"
_MOST_KINDS = 8  # of steps; a host keeps their graphs
_DEEP = 6  # levels of objects in which numbers that a step may read are looked for
_NOISE = 10  # times the difference of a step from itself by which its replay may differ from it
_ROUNDING = 1e-4  # beside that, as a share of what the step changes
_WARM_UPS = 3  # runs before a capture, in which libraries take memory on its stream
_LASTING = (
    *("task", "optimizer", "batch_size", "rounds", "keep_optimizer", "stage", "exchange", "phase"),
    *("schedule", "lr_factor", "configured_lr"),
)  # what a captured step may read of the context; steps with other values are of another kind


class NotCaptured(RuntimeError):
    """A step cannot be captured, and the process can go on capturing others."""


class StepGraphs:
    """The graphs of a host, one for each kind of steps, of those kinds that were used last.

    Args:
        enough_steps: The steps of a kind that are taken before one is captured; `ENOUGH_STEPS` by default.

    Attributes:
        counts: The steps by what became of them: `REPLAYED`, or why not.
        failure: Why nothing is captured any more; empty unless CUDA broke off a capture.
    """

    def __init__(self, capture: Capture, enough_steps: int | None = None):
        self.capture = capture
        self.enough_steps = enough_steps or ENOUGH_STEPS
        self.counts = Counter[str]()
        self.failure = ""
        self._kinds: list[_Kind] = []
        self._rates: tuple[Any, Rates | None] = (None, None)

    def rates(self, ctx: Context, like: Tensor) -> "Rates":
        """Return the learning rate and the schedule's factor of a round on the device of `like`, uploaded once."""
        dtype = torch.promote_types(like.dtype, torch.float32)
        key = (ctx.optimizer.lr, ctx.lr_factor, dtype, like.device)
        if self._rates[0] != key:
            numbers = torch.tensor([ctx.optimizer.lr, ctx.lr_factor], dtype=dtype)
            lr, factor = numbers.to(like.device, non_blocking=True).unbind()
            self._rates = key, Rates(lr, factor)
        rates = self._rates[1]
        assert rates is not None
        return rates

    def kind(self, *key: Any) -> "_Kind":
        """Return the kind with this key, which has now been used last."""
        known = (kind for kind in self._kinds if kind.key == key)
        kind = next(known, None) or _Kind(key)
        others = []
        for other in self._kinds:
            if other is not kind:
                others.append(other)
        self._kinds = [*others, kind][-_MOST_KINDS:]
        return kind


class _Kind:
    """Steps that one graph can replay: those of one exchange, on tensors of one form, with one lasting context."""

    def __init__(self, key: tuple[Any, ...]):
        self.key = key
        self.steps = 0
        self.reason = ""
        self.graph: _Graph | None = None
        self.checked = False  # a step after the captured one, with other inputs, gave what its replay gives
        self.replays = 0
        self.next_check = CHECK_AFTER  # the replays before it


class GraphedStep:
    """The step of one phase of a client or block; called in place of it.

    What it returns may be memory of a graph, which the steps of other clients overwrite.
    """

    def __init__(self, graphs: StepGraphs, exchange: Exchange, step: Step):
        self._graphs = graphs
        self._exchange = exchange
        self._step = step
        self._rates: Rates | None = None  # where a schedule changes them; for all steps, captured or not
        self._kinds: dict[Any, _Kind] = {}  # by the form of the batch: only the last batch, or a block, has another
        self._state = _python_state(exchange)

    def __call__(self, ctx: Context, work: State, down: State, batch: Batch) -> Result:
        kind = self._kind(ctx, work, down, batch)
        if kind.graph is not None and kind.checked and kind.replays < kind.next_check:
            kind.replays += 1
            self._graphs.counts[REPLAYED] += 1
            return kind.graph.replay(work, batch)
        kind.steps += 1
        enough = self._graphs.enough_steps
        self._graphs.counts[kind.reason or f"fewer than {enough} steps alike"] += 1
        if self._rates is not None:
            ctx = ctx.with_rates(*self._rates)
        if kind.reason or kind.steps < enough:
            return self._step(ctx, work, down, batch)
        if kind.graph is None:
            take = self._captured
        else:
            take = self._checked
        result = take(kind, ctx, work, down, batch)
        if kind.reason:
            kind.graph = None
            _log_once(kind.reason)
        return result

    def _kind(self, ctx: Context, work: State, down: State, batch: Batch) -> _Kind:
        """Return the kind of a step, whose graph has the `down` and the rates of this phase."""
        form = _form(batch)
        if form not in self._kinds:
            of_inputs = _form((work, down, batch))
            kind = self._graphs.kind(self._exchange, self._state, _lasting(ctx), of_inputs)
            self._kinds[form] = kind
            if not ctx.schedule.is_constant:
                self._rates = self._graphs.rates(ctx, _example(work, batch))
            if kind.graph is not None:
                _copy(kind.graph.down, down)
                _copy(kind.graph.rates, tuple(self._rates or ()))
        return self._kinds[form]

    def _captured(self, kind: _Kind, ctx: Context, work: State, down: State, batch: Batch) -> Result:
        """Take a step, and capture it if those to come can be replayed."""
        before = clone(work)
        watched = _watched(ctx)
        random = _random_states()
        result = self._step(watched, work, down, batch)
        form = kind.key[-1][0]
        kind.reason = self._graphs.failure or _obstacle(watched, random, form, before, result[0])
        if _python_state(self._exchange) != self._state:
            kind.reason = "the step changes attributes of the algorithm"
        if not kind.reason:
            try:
                kind.graph = _Graph(self._graphs.capture, self._step, ctx, before, down, batch)
            except (NotCaptured, torch.OutOfMemoryError) as error:  # after which CUDA captures other steps
                kind.reason = f"the step cannot be captured: {_said(error)}"
            except RuntimeError as error:  # CUDA's allocator may be in disorder now
                kind.reason = self._graphs.failure = f"a capture failed: {error_line(error)}"
        return result

    def _checked(self, kind: _Kind, ctx: Context, work: State, down: State, batch: Batch) -> Result:
        """Take a step, and compare it with its replay: equal to the bit, or as close as the step is to itself.

        Raises:
            ImpureHook: Replays before gave wrong numbers, too: they have repeated what has changed since.
        """
        assert kind.graph is not None
        before = clone(work)
        replayed = clone(kind.graph.replay(before, batch))
        again = self._step(ctx, clone(before), down, batch)
        result = self._step(ctx, clone(before), down, batch)  # `work` may be the memory of the graph
        difference = _difference(replayed, result, before)
        is_alike = difference <= _NOISE * _difference(again, result, before) + _ROUNDING
        if kind.replays and not is_alike and math.isfinite(difference):
            raise ImpureHook(
                f"{type(self._exchange).__name__}.step: gives other numbers than its CUDA graph, which has repeated it "
                f"{kind.replays} times: it reads something that changes besides its arguments, such as a global "
                "variable; keep that in the state, or set placement.cuda_graphs=false"
            )
        if _equal(again, result):
            is_alike = _equal(replayed, result)
        kind.checked = is_alike
        if kind.replays:
            kind.next_check = 2 * kind.replays
        if not is_alike:
            kind.reason = "a graph of the step gives other numbers"
        return result


def _said(error: Exception) -> str:
    if isinstance(error, NotCaptured):
        return str(error)
    return error_line(error)


class _Graph:
    """A captured step, with the memory that it reads and writes, in which `down` stays from step to step."""

    def __init__(self, capture: Capture, step: Step, ctx: Context, work: State, down: State, batch: Batch):
        self._work, self.down, self._batch = clone((work, down, batch))
        self.rates: tuple[Tensor, ...] = ()
        if isinstance(ctx.lr_factor, Tensor):
            lr, factor = clone((ctx.optimizer.lr, ctx.lr_factor))
            self.rates = lr, factor
            ctx = ctx.with_rates(lr, factor)

        def run() -> dict[str, Tensor]:
            work, metrics = step(ctx, self._work, self.down, self._batch)
            _write(self._work, work)
            return metrics

        self._repeat, self._metrics = capture(run)

    def replay(self, work: State, batch: Batch) -> Result:
        """Return what the step returns. The `work` that it returned last is not copied."""
        if work is not self._work:
            _copy(self._work, work)
        _copy(self._batch, batch)
        self._repeat()
        return self._work, clone(self._metrics)


class CudaCapture:
    """Captures CUDA graphs, which share memory, since no two of them run at once."""

    def __init__(self, device: torch.device):
        self._stream = _stream_of(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._first: torch.cuda.CUDAGraph | None = None  # kept, because the pool ends with its last graph

    def __call__(self, run: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
        graph = torch.cuda.CUDAGraph()
        outer = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(outer)
        try:
            with torch.cuda.stream(self._stream):  # a capture that fails would not leave its stream
                _warm_up(run)
                with torch.cuda.graph(graph, self._pool, self._stream):
                    result = run()
        finally:  # also after an error, as kernels of the stream may still write to memory that is then freed
            outer.wait_stream(self._stream)
        self._first = self._first or graph
        return graph.replay, result


def _warm_up(run: Callable[[], Any]) -> None:
    """Run a few times before a capture; raise NotCaptured if that waits for the GPU, which would break the capture."""
    mode = torch.cuda.get_sync_debug_mode()
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(_WARM_UPS):
            run()
    except RuntimeError as error:
        raise NotCaptured(error_line(error)) from error
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@functools.cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of captures: one for a process, as cuBLAS keeps 68 MB for each that it has seen."""
    return torch.cuda.Stream(device)


class _Watched(Context):
    """A context that notes in `reads` which of its attributes are read."""

    def __getattribute__(self, name: str) -> Any:
        attributes = object.__getattribute__(self, "__dict__")
        if name in attributes:
            attributes.setdefault("reads", set()).add(name)
        return object.__getattribute__(self, name)


def _watched(ctx: Context) -> Context:
    watched = object.__new__(_Watched)
    vars(watched).update(vars(ctx), reads=set())
    return watched


def _obstacle(watched: Context, random: Any, form: Any, before: State, work: State) -> str:
    """Return why a step from `before` to `work` cannot be replayed, "" if it can."""
    lasting = {*_LASTING}
    if not watched.schedule.is_constant:
        lasting.remove("configured_lr")  # the rate of a round that a schedule has not changed yet has none
    others = sorted(vars(watched)["reads"] - lasting)
    if others:
        return f"the step reads ctx.{others[0]}"
    if _random_states() != random:
        return "the step draws random numbers"
    if not form == _form(before) == _form(work):
        return "the step changes the form of its state"
    places = []
    for _, tensor in named_tensors(work):
        if tensor.numel():
            places.append(tensor.untyped_storage().data_ptr())
    if len({*places}) < len(places):
        return "tensors of the state share memory"
    return ""


def _lasting(ctx: Context) -> list[Any]:
    """Return what a captured step may read of the context; rates that a schedule changes are inputs of its graph."""
    if not ctx.schedule.is_constant:
        ctx = replace(ctx, optimizer=replace(ctx.optimizer, lr=0.0), lr_factor=1.0, configured_lr=None)
    return [getattr(ctx, name) for name in _LASTING]


def _example(work: State, batch: Batch) -> Tensor:
    """Return the floating tensor of `work` with the highest precision. Rates get its type and its device."""
    floats = [tensor for _, tensor in named_tensors(work) if tensor.is_floating_point()]
    if not floats:
        return batch.y.new_empty(0, dtype=torch.float32)
    return max(floats, key=lambda tensor: torch.finfo(tensor.dtype).bits)


def _random_states() -> list[list[int]]:
    on_gpus = []
    if torch.cuda.is_initialized():
        on_gpus = torch.cuda.get_rng_state_all()
    return [state.tolist() for state in (torch.get_rng_state(), *on_gpus)]


def _form(tree: Any) -> Any:
    """Return `tree` with the form of each tensor in its place; numbers that are no tensors stay."""
    return tree_map(lambda x: (x.shape, x.stride(), x.dtype), tree)


def _copy(memory: Any, tree: Any) -> None:
    """Copy `tree` into `memory`, of the same form, with one operation for many tensors."""
    pairs: list[tuple[Tensor, Tensor]] = []
    tree_map(lambda old, new: pairs.append((old, new)), memory, tree)
    if pairs:
        olds = [old for old, _ in pairs]
        torch._foreach_copy_(olds, [new for _, new in pairs])


def _write(memory: Any, tree: Any) -> None:
    """Copy `tree` into `memory`; its tensors may be those of `memory`, in other places, too."""
    others = tree_map(lambda old, new: old if old.is_set_to(new) else new.clone(), memory, tree)
    tree_map(lambda old, new: old if new is old else old.copy_(new), memory, others)


def _equal(tree: Any, other: Any) -> bool:
    tests: list[bool] = []
    tree_map(lambda a, b: tests.append(torch.equal(a, b)), tree, other)
    return all(tests)


def _difference(found: Result, wanted: Result, before: State) -> float:
    """Return by how much two results of a step from `before` differ, as a share of what the step changes.

    Weights themselves change so little in a step that a wrong learning rate would be taken for rounding.
    """
    of_state = _share(found[0], wanted[0], before)
    of_metrics = _share(found[1], wanted[1], {})
    return of_state + of_metrics


def _share(found: Any, wanted: Any, before: Any) -> float:
    """Return |found − wanted| / |wanted − before|, each over all tensors of a tree."""
    starts = dict(named_tensors(before))
    ends = dict(named_tensors(wanted))
    errors = 0.0
    changes = 0.0
    for path, tensor in named_tensors(found):
        end = as_real(ends[path]).double()
        change = end
        if path in starts:
            change = end - as_real(starts[path]).double()
        errors += float((as_real(tensor).double() - end).square().sum())
        changes += float(change.square().sum())
    if not errors:
        return 0.0
    if not changes:
        return math.inf
    return math.sqrt(errors / changes)


def _python_state(value: Any, levels: int = _DEEP) -> Any:
    """Return what a step may read of an exchange or another object, so that a change is seen by comparison."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return value
    if isinstance(value, Tensor):
        return id(value), value._version
    if not levels or isinstance(value, (type, nn.Module)):
        return id(value)
    if isinstance(value, (set, frozenset)):
        return frozenset(value)
    if isinstance(value, (list, tuple)):
        return [_python_state(item, levels - 1) for item in value]
    if isinstance(value, dict):
        return {key: _python_state(item, levels - 1) for key, item in value.items()}
    if callable(value) or not hasattr(value, "__dict__"):
        return id(value)
    states = [_python_state(vars(value), levels - 1)]
    for kind in type(value).__mro__:
        if not kind.__module__.startswith(("rayfed.", "builtins")):  # whose classes count nothing
            states.append({name: item for name, item in vars(kind).items() if type(item) in (int, float)})
    return states


@functools.cache
def _log_once(reason: str) -> None:
    logging.getLogger(__name__).info("steps run without a CUDA graph: %s", reason)
