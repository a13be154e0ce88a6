"""Whatever a configuration holds, it is read, and then means the same when it is read again, or refused in one line."""

import dataclasses
import math
import typing

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from helpers.damage import in_one_line
from rayfed.algorithms import ALGORITHMS
from rayfed.core.errors import UsageError
from rayfed.core.registry import resolve
from rayfed.experiments.config import GROUPS, Config
from rayfed.experiments.plan_identity import trial_name
from rayfed.experiments.sources import from_arguments
from rayfed.experiments.space import read_space

FEW = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
MANY = settings(max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
EXAMPLES = pytest.mark.parametrize("examples", [FEW, pytest.param(MANY, marks=pytest.mark.slow)], ids=["few", "many"])

numbers = st.one_of(
    st.integers(),
    st.sampled_from([2**31, 2**63 - 1, 2**63, -(2**63), 10**23, 0, 1, -1]),
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from([1e-320, 1e-38, 3.5e38, 0.0, -0.0, 0.5, 1.0]),
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=12), st.dates(), st.binary(max_size=4)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.one_of(st.text(max_size=6), st.integers()), inner, max_size=3)
    ),
    max_leaves=6,
)


def _keys():
    """All keys of the configuration, dotted."""
    keys = [f.name for f in dataclasses.fields(Config) if f.metadata]
    keys += [f"{group}.{f.name}" for group, kind in GROUPS.items() for f in dataclasses.fields(kind)]
    components = [f"{name}.name" for name in ("algorithm", "data", "partition", "model", "augment")]
    return [*keys, *components, *GROUPS, "algorithm", "data", "metrics", "metrics.ece", "nonsense", "local.nonsense"]


KEYS = _keys()
trees = st.dictionaries(st.one_of(st.sampled_from(KEYS), st.text(max_size=8)), values, max_size=5)


def check_tree(tree):
    try:
        config = Config.read(tree)
    except UsageError as error:
        in_one_line(error)
        return
    again = Config.read(config.tree())
    assert again.tree() == config.tree()
    assert trial_name(again) == trial_name(config)
    for value in vars(config.local).values():
        assert not isinstance(value, float) or math.isfinite(value)


@EXAMPLES
def test_trees(examples):
    @examples
    @given(trees)
    @example({"rounds": 10**23})
    @example({"local.lr": 1e-320})
    @example({"local": {"lr": {"grid": [1]}}})
    @example({"": 1})
    @example({"local..lr": 1})
    def check(tree):
        check_tree(tree)

    check()


@st.composite
def hyperparameters(draw):
    """An algorithm with a value for one of its options."""
    name = draw(st.sampled_from(sorted(ALGORITHMS)))
    cls = resolve(ALGORITHMS[name], ALGORITHMS, where="algorithm.name")
    options = sorted(typing.get_type_hints(cls).keys() & {f.name for f in dataclasses.fields(cls)})
    return {"algorithm": {"name": name, **({draw(st.sampled_from(options)): draw(values)} if options else {})}}


@EXAMPLES
def test_hyperparameters(examples):
    examples(given(hyperparameters())(check_tree))()


def check_space(tree):
    try:
        space = read_space(tree)
        for trial in space.trials():
            Config.read(trial)
    except UsageError as error:
        in_one_line(error)


spaces = st.dictionaries(
    st.sampled_from([*KEYS, "seeds", "arms", "search", "search.kind", "search.samples"]),
    st.one_of(
        values,
        st.dictionaries(st.sampled_from(["grid", "choice", "uniform", "loguniform", "randint"]), values, max_size=2),
        st.lists(trees, max_size=2),
        st.integers(0, 5),
        st.lists(st.integers(0, 3), max_size=3),
    ),
    max_size=4,
)


@EXAMPLES
def test_spaces(examples):
    examples(given(spaces)(example({"arms": []})(check_space)))()


def check_arguments(arguments):
    try:
        tree = from_arguments(arguments)
    except UsageError as error:
        in_one_line(error)
        return
    check_tree(tree)


arguments = st.lists(st.one_of(st.text(max_size=20), st.builds("{}={}".format, st.sampled_from(KEYS), st.text())))


@EXAMPLES
def test_arguments(examples):
    @examples
    @given(arguments)
    @example(["local={lr: !!python/object:os.system {}}"])
    @example(["rounds=!!int x"])
    @example(["rounds=2001-99-99"])
    @example(["a=\x00"])
    @example(["algorithm.name="])
    def check(given_arguments):
        check_arguments(given_arguments)

    check()
