"""Training longer: a trial goes on from a finished one with the same values and fewer rounds.

The longer trial ends with the bits of one that had all rounds from the start. It takes the place of the shorter one,
with all that was scored after its last round but the scores of unseen clients.
"""

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from rayfed.core.errors import StorageError
from rayfed.core.lr_schedule import LrSchedule
from rayfed.core.records import Event
from rayfed.engine.checkpoint import newest_round
from rayfed.experiments.config import Config
from rayfed.experiments.naming import trial_name
from rayfed.experiments.plan import hash_in_checkpoints
from rayfed.experiments.trial import nothing_left, resume_message
from rayfed.experiments.user_code import checked_code_hash, named_objects
from rayfed.records.checkpoints import CheckpointStore
from rayfed.records.storage import Storage, open_storage, storage_errors
from rayfed.records.trials import forget_trial, read_trials
from rayfed.records.writer import TrialWriter


class Longer(NamedTuple):
    """A trial that may go on from a shorter one.

    Attributes:
        given_hash: The hash of what was given in Python that is part of its name; see `Plan`.
    """

    trial: str
    config: Config
    given_hash: str = ""


class Start(NamedTuple):
    """Where a trial is going to start.

    Attributes:
        round: The last round that is done already; 0: none.
        what: What happens, in words that follow the name of the trial; empty if nothing is saved.
        finished: Whether nothing is left to do.
        shorter: The trial whose place it takes; empty without one.
    """

    round: int = 0
    what: str = ""
    finished: bool = False
    shorter: str = ""


def continue_shorter(trials: Sequence[Longer], keep: Collection[str] = ()) -> list[str]:
    """Give each trial the state and the rows of a finished trial with fewer rounds, if it has no checkpoint itself.

    The caller has claimed the trials, and then resumes them, which compares the data.

    Args:
        trials: Trials of one experiment.
        keep: Shorter trials that stay, since they belong to the same sweep. The others are deleted.

    Returns:
        A line on each trial that has a shorter one.

    Raises:
        UsageError: The user's own code has changed since the shorter trial ran.
        StorageError: The results cannot be written.
    """
    if not trials:
        return []
    with _results(trials) as (home, rows):
        starts = {longer.trial: _found(longer, rows, home, hand_over=True) for longer in trials}
        for shorter in {start.shorter for start in starts.values()} - {""} - set(keep):
            _delete(trials[0].config, rows[shorter], home)
        return [f"{trial} {start.what}" for trial, start in starts.items() if start.what]


def foreseen_starts(trials: Sequence[Longer]) -> dict[str, Start]:
    """Return by trial where `resume=true` would start: after its own checkpoint, or after a shorter trial.

    Nothing is written. Arguments and errors are those of `continue_shorter`.
    """
    if not trials:
        return {}
    with _results(trials) as (home, rows):
        return {longer.trial: _own_start(longer, home) or _found(longer, rows, home) for longer in trials}


@contextlib.contextmanager
def _results(trials: Sequence[Longer]) -> Iterator[tuple[Storage, Mapping[str, Mapping[str, Any]]]]:
    """Yield the folder of the experiment of `trials` and the rows of the trials in it that are done."""
    home = open_storage(trials[0].config.results).child(trials[0].config.experiment)
    with storage_errors(home.location):
        yield home, {row["trial"]: row for row in read_trials(home.child("trials")) if row["status"] == "done"}


def _own_start(longer: Longer, home: Storage) -> Start | None:
    """Return where a trial continues after its own checkpoints; None if it has none."""
    saved = CheckpointStore(home, longer.trial).saved()
    if not saved:
        return None
    what, finished = resume_message(longer.config, saved), nothing_left(longer.config, saved)
    return Start(min(newest_round(saved) or 0, longer.config.rounds), what, finished)


def _found(longer: Longer, rows: Mapping[str, Mapping[str, Any]], home: Storage, *, hand_over: bool = False) -> Start:
    """Return where the trial goes on from a shorter one, after copying its state and rows if `hand_over`."""
    store = CheckpointStore(home, longer.trial)
    shorter = _shorter(longer, rows)
    if not shorter or store.exists():
        return Start()
    if reason := _dependence(longer.config):
        return Start(what=f"starts at round 1 and not where {shorter[0]['trial']} ended, since {reason}")
    for row in shorter:
        kept = CheckpointStore(home, row["trial"])
        for checkpoint in kept.saved():
            content = checkpoint.get("content")
            if content is None or not _fits(content, longer, row):
                continue
            if not longer.given_hash:  # otherwise the hash covers more than the configuration names
                checked_code_hash(longer.config, row["trial"], named_objects(longer.config))
            with contextlib.suppress(StorageError):  # damaged; the one before it may not be
                if hand_over:
                    _hand_over(longer, row, store, kept, content)
                else:
                    kept.check(content)
                what = f"goes on after round {content['round']} of {row['trial']}"
                return Start(content["round"], what, shorter=row["trial"])
    reason = f"no checkpoint of {shorter[0]['trial']} can be used (checkpoint.every=k keeps one)"
    return Start(what=f"starts at round 1, since {reason}")


def _shorter(longer: Longer, rows: Mapping[str, Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rows of the trials that differ in nothing but fewer rounds, the longest first."""
    rounds = {row["rounds"] for row in rows.values() if type(row.get("rounds")) is int}
    names = {
        number: trial_name(replace(longer.config, rounds=number), longer.given_hash)
        for number in rounds
        if 1 <= number < longer.config.rounds
    }
    return [rows[names[number]] for number in sorted(names, reverse=True) if names[number] in rows]


def _dependence(config: Config) -> str | None:
    """Return why the first rounds depend on how many follow, or None if they do not."""
    if LrSchedule(kind=config.local.lr_schedule).depends_on_rounds:
        return f"local.lr_schedule={config.local.lr_schedule} depends on rounds={config.rounds} from the start"
    if config.algorithm.depends_on_rounds:
        return f"{config.algorithm_name} depends on rounds={config.rounds} from the start"
    return None


def _fits(content: Mapping[str, Any], longer: Longer, row: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint of the trial in `row` is a state through which the longer trial goes, too."""
    shorter = replace(longer.config, rounds=row["rounds"])
    if content["configuration"] != _configuration(row["trial"], shorter, row):
        return False  # of an attempt with other code or data
    if content["round"] > row["rounds"]:
        return False  # after the final stage
    if not content["progress"].get("finished"):
        return True
    if longer.config.unseen_clients and longer.config.algorithm.setup_exchanges:
        return False  # unseen clients have a state by then
    if longer.config.unseen_clients and content["progress"].get("early_stopping", {}).get("reason") is not None:
        return False  # the longer trial ends there as well, and scores of unseen clients are not copied
    stops, every = longer.config.early_stopping.patience is not None, longer.config.evaluate.every
    return not stops or content["round"] % every == 0  # else the rule has seen a score that the longer trial has not


def _configuration(trial: str, config: Config, row: Mapping[str, Any]) -> str:
    """Return the hash in checkpoints of `trial`, whose data and code are those of the trial in `row`."""
    names = [str(row.get(f"{key}.name") or "") for key in ("model", "loss")]
    model_label, loss_label = (name if name.startswith("own:") else None for name in names)
    return hash_in_checkpoints(trial, config, row.get("partition_hash"), model_label, loss_label, row.get("code_hash"))


def _hand_over(
    longer: Longer,
    row: Mapping[str, Any],
    store: CheckpointStore,
    kept: CheckpointStore,
    content: Mapping[str, Any],
) -> None:
    """Copy rows and then the checkpoint, with which the longer trial is one that was interrupted."""
    config, round = longer.config, content["round"]
    writer = TrialWriter(config.results, config.experiment, longer.trial, row["algorithm"], config.seed)
    writer.copy_rows(row["trial"], through_round=round)
    detail = f"goes on from {row['trial']}, which had rounds={row['rounds']}"
    writer.add_events([Event(event="rounds added", detail=detail, round=round)])
    best = (content.get("best") or {}).get("number")
    for one in [content] if best in (None, content["number"]) else [kept.manifest(best), content]:
        progress = dict(one["progress"])
        if progress.get("early_stopping", {}).get("reason") is None:
            progress["finished"] = False
        header = {
            "trial": longer.trial,
            "configuration": _configuration(longer.trial, config, row),
            "rayfed": one["rayfed"],
            "round": one["round"],
            "progress": progress,
            "is_best": one["number"] == best,
        }
        store.copy(kept, one, header)


def _delete(config: Config, row: Mapping[str, Any], home: Storage) -> None:
    """Delete the rows and the checkpoints of the trial in `row`, which another one has taken over."""
    TrialWriter(config.results, config.experiment, row["trial"], row["algorithm"], row["seed"]).close()
    CheckpointStore(home, row["trial"]).delete()
    forget_trial(config.results, config.experiment, row["trial"])
