"""Client sampling: each rule by hand, unbiased aggregates, what losses cost, resuming, and refusals."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from helpers.federations import blobs, blueprint, new_server
from rayfed.algorithms.adcol import Adcol
from rayfed.algorithms.fedavg import FedAvg, Solo
from rayfed.algorithms.feddyn import FedDyn
from rayfed.algorithms.fedfomo import FedFomo
from rayfed.algorithms.fedgen import FedGen
from rayfed.algorithms.fedproto import FedProto
from rayfed.algorithms.fraug import FRAug
from rayfed.algorithms.scaffold import Scaffold
from rayfed.core.errors import BadHook, UsageError
from rayfed.engine.clock import Availability
from rayfed.experiments.checks import check_trial
from rayfed.sampling.base import BySize, Cohort, Drawing, PowerOfChoice, Sampler, Uniform

SHARES = np.array([0.4, 0.3, 0.2, 0.1])
LOSSES = np.array([1.0, 4.0, 2.0, 3.0])


def drawing(seed=0, size=2, shares=SHARES, last_losses=LOSSES, losses=None):
    ask = losses or (lambda clients: LOSSES[list(clients)])
    rng = np.random.default_rng(seed)
    common = {"rng": rng, "rng_of_cycle": lambda rounds: rng, "losses": ask}
    return Drawing(round=1, size=size, shares=shares, last_losses=last_losses, **common)


class TestBySize:
    def test_factors_are_1_in_expectation(self):
        """So that the expected aggregate is that of full participation, whatever the weights of the method."""
        total, draws = np.zeros(4), 6000
        for seed in range(draws):
            cohort = BySize().draw(drawing(seed))
            total[list(cohort.clients)] += cohort.factors
        assert total / draws == pytest.approx(np.ones(4), abs=0.08)

    def test_who_is_drawn_several_times_counts_several_times(self):
        counts = np.random.default_rng(3).multinomial(5, SHARES)
        cohort = BySize().draw(drawing(3, size=5))
        assert list(cohort.clients) == np.flatnonzero(counts).tolist()
        weights = SHARES[list(cohort.clients)] * cohort.factors
        assert weights == pytest.approx(counts[counts > 0] / 5)  # the plain mean over the draws


class TestPowerOfChoice:
    def test_the_highest_losses_among_all(self):
        assert PowerOfChoice(candidates=4).draw(drawing()) == Cohort([1, 3], equal=True)
        assert PowerOfChoice(candidates=4).draw(drawing(size=3)) == Cohort([1, 2, 3], equal=True)

    def test_only_candidates_are_asked_and_chosen(self):
        asked = []

        def losses(clients):
            asked.append(list(clients))
            return LOSSES[list(clients)]

        for seed in range(20):
            cohort = PowerOfChoice(candidates=3).draw(drawing(seed, losses=losses))
            assert len(asked[-1]) == 3
            best = sorted(asked[-1], key=lambda i: -LOSSES[i])[:2]
            assert list(cohort.clients) == sorted(best)

    def test_candidates_are_drawn_by_size(self):
        """With as many candidates as clients in the cohort, they are the cohort."""
        sampler, counts = PowerOfChoice(candidates=1), Counter()
        for seed in range(4000):
            counts.update(sampler.draw(drawing(seed, size=1)).clients)
        assert [counts[i] / 4000 for i in range(4)] == pytest.approx(SHARES, abs=0.03)

    def test_those_that_never_took_part_come_first(self):
        last = np.array([9.0, np.nan, 8.0, np.nan])
        sampler = PowerOfChoice(candidates=4, losses="last")
        assert sampler.draw(drawing(last_losses=last, losses=lambda clients: 1 / 0)).clients == [1, 3]

    def test_ties_are_broken_at_random(self):
        sampler = PowerOfChoice(candidates=4)
        drawn = {tuple(sampler.draw(drawing(seed, losses=lambda c: np.ones(len(c)))).clients) for seed in range(60)}
        assert len(drawn) == 6


@dataclass(frozen=True, kw_only=True)
class Fixed(Sampler):
    """Clients 0 and 2, with factors of its own."""

    reweights = True
    cohort = Cohort([2, 0], (1.5, 3.0))  # in any order

    def draw(self, at):
        return self.cohort


def server(sampler, algorithm=None, population=None, **changes):
    population = population or blobs(4)
    plan = blueprint(algorithm or FedAvg(), population, **{"cohort": 2, "sampler": sampler} | changes)
    check_trial(plan, population)
    points = (plan.algorithm.traits.default_eval_point,)
    return new_server(plan, population, points=points)


def trained_alone(client, algorithm=None):
    """The server's state after training of one client in round 1 from the initial weights."""

    @dataclass(frozen=True, kw_only=True)
    class Only(Fixed):
        cohort = Cohort([client], equal=True)

    one = server(Only(), algorithm)
    next(one.run())
    return one.state


class TestAggregate:
    def test_factors_move_the_model_and_average_running_statistics(self):
        """w_0 = 20/120 and w_2 = 33/120 of the examples: a = 3 · 20/120 and 1.5 · 33/120."""
        tested = server(Fixed())
        start = {name: value.clone() for name, value in tested.state["weights"].items()}
        record = next(tested.run())
        zero, two = trained_alone(0)["weights"], trained_alone(2)["weights"]
        a, b = 3.0 * 20 / 120, 1.5 * 33 / 120
        buffers = tested.ctx.task.model.buffers
        for name, value in tested.state["weights"].items():
            if not value.is_floating_point():
                continue
            if name in buffers:
                expected = (a * zero[name] + b * two[name]) / (a + b)
            else:
                expected = start[name] + a * (zero[name] - start[name]) + b * (two[name] - start[name])
            assert torch.allclose(value, expected, atol=1e-5), name
        assert (record.cohort, record.sampled) == (2, 2)

    def test_running_statistics_of_a_methods_own_networks_are_averaged(self):
        """Moved by 3 · 20/120 + 1.5 · 33/120 = 0.91 in place of 1 they would keep a part of what was sent; by more
        than 1, variances may become negative."""
        tested = server(Fixed(), FRAug(latent=4))
        sent = tested.state["generator"]
        next(tested.run())
        zero, two = (trained_alone(client, FRAug(latent=4))["generator"] for client in (0, 2))
        a, b = 3.0 * 20 / 120, 1.5 * 33 / 120
        for name, value in tested.state["generator"].items():
            moved = sent[name] + a * (zero[name] - sent[name]) + b * (two[name] - sent[name])
            mean = (a * zero[name] + b * two[name]) / (a + b)
            expected = mean if "running" in name else moved
            assert not value.is_floating_point() or torch.allclose(value, expected, atol=1e-5), name

    @pytest.mark.parametrize(("equal", "share"), [(True, 1 / 2), (False, 20 / 53)])
    def test_equal_weights_or_those_of_the_method(self, equal, share):
        sampler = type("Two", (Fixed,), {"reweights": equal, "cohort": Cohort([0, 2], equal=equal)})
        tested = server(sampler())
        next(tested.run())
        zero, two = trained_alone(0)["weights"], trained_alone(2)["weights"]
        for name, value in tested.state["weights"].items():
            if value.is_floating_point():
                assert torch.allclose(value, share * zero[name] + (1 - share) * two[name], atol=1e-6), name

    @pytest.mark.parametrize(
        ("cohort", "message"),
        [
            (Cohort([0, 0]), "different ones"),
            (Cohort([]), "returned 0 clients, expected 1 to 2"),
            (Cohort([0, 1, 2]), "returned 3 clients"),
            (Cohort([4]), "returned client 4, expected positions from 0 to 3"),
            (Cohort([-1, 2]), "returned client -1, expected positions from 0 to 3"),
            (Cohort([0, 1], [1.0]), "one finite non-negative number per client"),
            (Cohort([0, 1], [1.0, float("nan")]), "one finite non-negative number per client"),
        ],
    )
    def test_what_is_no_cohort(self, cohort, message):
        wrong = type("Wrong", (Fixed,), {"cohort": cohort})
        with pytest.raises(BadHook, match=message):
            next(server(wrong()).run())


class TestLosses:
    def test_they_are_those_of_the_model_on_training_data_and_are_counted(self):
        tested = server(PowerOfChoice(candidates=4))
        losses, _ = tested.evaluator.training_losses(tested.state, 1, (0, 1, 2, 3))
        task, population = tested.ctx.task, tested.population
        for i in range(4):
            part = population.clients[i].train
            x, y = torch.from_numpy(part.x), torch.from_numpy(part.y)
            with torch.no_grad():
                expected = task.scoring_loss(task.predict(tested.state["weights"], x), y)
            assert losses[i] == pytest.approx(float(expected), abs=1e-5)
        record = next(tested.run())
        highest = sorted(losses, key=losses.get)[-2:]
        assert {score.client for score in record.scores if score.point == "trained"} == set(highest)
        plain = next(server(Uniform()).run())
        assert record.bytes_down["weights"] == 2 * plain.bytes_down["weights"]  # four candidates, two of them chosen
        assert record.bytes_up == plain.bytes_up | {"sampling loss": 16}

    def test_last_losses_are_what_clients_report(self):
        tested = server(PowerOfChoice(candidates=4, losses="last"))
        first, second = list(tested.run())
        reported = {s.client: s.value for s in first.scores if (s.metric, s.point) == ("loss", "trained")}
        later = {s.client: s.value for s in second.scores if (s.metric, s.point) == ("loss", "trained")}
        assert len(reported | later) == 4  # the others came first
        kept = tested.rounds.state()["sampling"]["last_losses"]
        assert kept == {str(i): v for i, v in sorted((reported | later).items())}
        assert "sampling loss" not in first.bytes_up


class Largest(Sampler):
    def draw(self, at):
        return Cohort(np.argsort(at.shares)[-at.size :].tolist())


def test_shares_are_those_of_training_examples():
    assert server(Largest()).sample(1) == (2, 3)  # of 20, 26, 33 and 41


class TestRefusals:
    @pytest.mark.parametrize(
        ("sampler", "changes", "message"),
        [
            (BySize(), {"algorithm": Scaffold()}, "algorithm.name=scaffold assumes that clients are sampled uniformly"),
            (BySize(), {"algorithm": FedDyn()}, "algorithm.name=feddyn assumes that clients are sampled uniformly"),
            (BySize(), {"algorithm": FedGen()}, "algorithm.name=fedgen assumes that clients are sampled uniformly"),
            (BySize(), {"algorithm": FedFomo()}, "algorithm.name=fedfomo averages nothing"),
            (BySize(), {"algorithm": Solo()}, "algorithm.name=solo averages nothing"),
            (BySize(), {"algorithm": FedProto()}, "algorithm.name=fedproto averages nothing"),
            (PowerOfChoice(), {"algorithm": Adcol()}, "algorithm.name=adcol averages nothing"),
            (BySize(), {"availability": Availability(dropout=0.1)}, "availability.* makes some"),
            (PowerOfChoice(candidates=1), {}, "sampling.candidates=1: expected 2 (cohort) to 4 (clients)"),
            (PowerOfChoice(candidates=5), {}, "sampling.candidates=5: expected 2 (cohort) to 4"),
        ],
    )
    def test_one_line(self, sampler, changes, message):
        with pytest.raises(UsageError) as error:
            server(sampler, **changes)
        assert message in str(error.value)
