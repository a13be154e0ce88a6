"""Mechanisms of differential privacy, and the caveats about their guarantees that are printed before a run."""

SIMULATION_NOTE = (
    "noise is drawn from the run's seed and recorded scores are exact: this measures the cost of privacy, it protects "
    "nobody"
)


def large_delta_note(delta: float, count: int, unit: str) -> tuple[str, ...]:
    """Return a note if δ is not below 1/`count`, for `count` protected units that are called `unit` in the plural."""
    if delta * count < 1:
        return ()
    return (f"δ={delta:g} is not below 1/{count}: publishing one of the {count} {unit} in the clear would satisfy it",)
