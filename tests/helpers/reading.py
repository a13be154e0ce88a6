"""What reads results through the API, for `helpers.watcher`: each returns 0."""

import rayfed


def load(arguments: list[str]) -> int:
    """Load a trial, its model and its states."""
    folder, experiment, trial = arguments
    result = rayfed.load(folder, experiment, trial)
    result.model()
    list(result.clients.values())
    repr(result)
    return 0


def read_results(arguments: list[str]) -> int:
    """Read all tables, and the events."""
    tables = rayfed.read_results(arguments[0])
    assert not tables.trials.empty
    rayfed.read_events(arguments[0])
    rayfed.report(arguments[0])
    return 0
