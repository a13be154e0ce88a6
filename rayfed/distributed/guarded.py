"""Callbacks of Ray Tune that were given in Python. None of them can end a sweep."""

from collections.abc import Callable
from typing import Any

from ray import tune

from rayfed.core.errors import error_line

_HOOKS = (
    *("setup", "on_step_begin", "on_step_end", "on_trial_start", "on_trial_restore", "on_trial_save"),
    *("on_trial_result", "on_trial_complete", "on_trial_recover", "on_trial_error", "on_checkpoint"),
    "on_experiment_end",
)


def guarded(callback: Any, say: Callable[[str], None]) -> tune.Callback:
    """Return a callback that calls `callback` until one of its hooks raises. A line then says so."""
    failed: list[str] = []

    def hook(name: str) -> Callable[..., None]:
        def call(self: Any, *arguments: Any, **named: Any) -> None:
            if failed:
                return
            try:
                getattr(callback, name)(*arguments, **named)
            except Exception as error:  # of the user's code
                failed.append(name)
                who = f"{type(callback).__name__}.{name}"
                say(f"callback {who} failed ({error_line(error)}); the sweep goes on without it")

        return call

    hooks: dict[str, Any] = {name: hook(name) for name in _HOOKS}
    hooks["__getstate__"] = lambda self: {}  # Tune saves callbacks, to restore a sweep; rayfed restores its own
    made: tune.Callback = type("Guarded", (tune.Callback,), hooks)()
    return made
