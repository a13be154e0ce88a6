"""What must be said of a promise of privacy before a run."""

SIMULATION_NOTE = (
    "noise comes of the seed, and the tables' scores are bare: what privacy costs is measured, nobody is protected"
)


def large_delta_note(delta: float, count: int, what: str) -> tuple[str, ...]:
    """A line if δ is not below one over the `count` units that are protected, `what` they are."""
    if delta * count < 1:
        return ()
    return (f"δ={delta:g} is not below 1/{count}: to give away one of the {count} {what} outright would keep to it",)
