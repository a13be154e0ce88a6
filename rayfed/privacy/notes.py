"""Caveats about privacy guarantees, printed before a run."""

SIMULATION_NOTE = (
    "noise is drawn from the run's seed and recorded scores are exact: this measures the cost of privacy, it protects "
    "nobody"
)


def large_delta_note(delta: float, count: int, unit: str) -> tuple[str, ...]:
    """Return a note if δ is not below 1/`count`, where `count` is the number of protected units.

    Args:
        delta: δ.
        count: Number of protected units.
        unit: Name of the unit in the plural, such as "parties".
    """
    if delta * count < 1:
        return ()
    return (f"δ={delta:g} is not below 1/{count}: publishing one of the {count} {unit} in the clear would satisfy it",)
