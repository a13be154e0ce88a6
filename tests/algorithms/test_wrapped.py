"""What an algorithm declares to wrappers is true: terms of the task's objective reach it, and soft labels do or not."""

import dataclasses

import pytest

from helpers.algorithm_cases import CASES, algorithm_of, plan_of, server_of
from helpers.federations import net
from rayfed.algorithms import ALGORITHMS
from rayfed.algorithms.centralised import ERM
from rayfed.algorithms.common.wrapper import Wrapper
from rayfed.algorithms.dbe import DBE
from rayfed.algorithms.mixup import Mixup
from rayfed.core.errors import UsageError

AVERAGE_NOTHING = ("solo", "fedproto")  # so that clients have nothing in common for DBE to be about
BASES = [name for name in ALGORITHMS if not isinstance(algorithm_of(CASES[name]), Wrapper)]


def central(name):
    return isinstance(algorithm_of(CASES[name]), ERM)


def outcome(name, wrap):
    """The hash of what training leaves."""
    case = CASES[name]
    if central(name):  # averages all of the model
        case = dataclasses.replace(case, changes={"model": net(batch_norm=False)})
    server = server_of(plan_of(case, algorithm=wrap(algorithm_of(case))))
    list(server.run())
    return server.state_hash()


@pytest.mark.parametrize("name", BASES)
def test_terms_of_the_objective_reach_those_that_take_them(name):
    def wrap(kappa):
        return lambda base: DBE(base=base, prbm=False, kappa=kappa)

    why = "averages nothing of the model" if name in AVERAGE_NOTHING else "DBE wraps methods that train one model"
    if name in AVERAGE_NOTHING or not algorithm_of(CASES[name]).traits.supports_loss_terms:
        with pytest.raises(UsageError, match=rf"^algorithm.base={name}: .*{why}"):
            outcome(name, wrap(1.0))
        return
    assert not central(name)  # they keep nothing with a client, not even a mean
    assert outcome(name, wrap(1.0)) != outcome(name, wrap(2.0))


@pytest.mark.parametrize("name", BASES)
def test_mixed_labels_train_those_that_do_not_need_whole_ones(name):
    if algorithm_of(CASES[name]).traits.requires_hard_labels:
        with pytest.raises(UsageError, match=rf"^algorithm.base={name}: needs integer class labels"):
            outcome(name, lambda base: Mixup(base=base))
    else:
        plain, mixed = (outcome(name, wrap) for wrap in (lambda base: base, lambda base: Mixup(base=base)))
        assert plain != mixed
