"""The refusal of client sampling by methods that need every client in every round."""

from rayfed.algorithm import Setting
from rayfed.errors import UsageError


def refuse_sampling(setting: Setting, name: str, why: str) -> None:
    """Raises UsageError where a round may leave clients out; `why` says what the method does with all of them."""
    if not setting.everyone:
        clients = setting.task.num_clients
        raise UsageError(f"cohort={setting.cohort}: algorithm.name={name} {why}; use cohort=1.0, all {clients} clients")
