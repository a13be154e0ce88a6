"""The refusal of client sampling by methods that need every client in every round."""

from rayfed.algorithm import ProblemSpec
from rayfed.core.errors import UsageError


def refuse_sampling(problem: ProblemSpec, name: str, reason: str) -> None:
    """Raise UsageError if a round may leave clients out; `reason` says what the method does with all of them."""
    if not problem.full_participation:
        raise UsageError(f"cohort={problem.cohort}: algorithm.name={name} {reason}; leave out cohort and cohort_share")
