"""What `rayfed check` finds with a channel, what is printed before a run, and how a channel is named."""

import pytest

from rayfed.channel.accounting import epsilon_spent
from rayfed.core.errors import UsageError
from rayfed.experiments.channel_notes import channel_notes
from rayfed.experiments.checks.trial import Trial
from rayfed.experiments.config import Config
from rayfed.experiments.contract import findings
from rayfed.experiments.plan import make_plan
from rayfed.experiments.plan_identity import trial_name

SMALL = {"model": {"name": "mlp", "hidden": [4]}, "data": {"per_domain": 30, "domains": ["plain", "font"]}}
SMALL |= {"partition": {"name": "iid", "clients": 10}, "local.batch_size": 2}
PARTS = {
    "privacy": {"privacy": {"sigma": 0.1, "delta": 0.01}, "algorithm.weighting": "equal"},
    "adaptive": {
        "privacy": {"sigma": 0.1, "delta": 0.01, "quantile": 0.5, "bits_noise": 1},
        "algorithm.weighting": "equal",
        "sampling.name": "poisson",
        "cohort": 5,
    },
    "compression": {"compression": {"name": "topk", "share": 0.3, "down": "sign"}},
    "attack": {"attack": {"name": "alie", "share": 0.3}, "robust.name": "krum"},
    "all": {
        "algorithm.name": "scaffold",
        "privacy": {"sigma": 0.01, "delta": 0.01},
        "compression": {"name": "qsgd", "feedback": True},
        "attack": {"name": "minmax", "share": 0.3},
        "robust.name": "centred_clipping",
    },
}


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_rayfed_check_finds_nothing(parts):
    plan = make_plan(Config.read(SMALL, parts))
    broken = {finding.subject: finding.found for finding in findings(plan, lambda small: "") if not finding.kept}
    assert broken == {}


def test_the_lines_before_a_run_say_what_each_part_does():
    given = {**PARTS["all"], "privacy": {"sigma": 2, "delta": 0.01, "noise_cohort": 500}, "rounds": 4}
    plan = make_plan(Config.read(SMALL, given))
    privacy, larger, simulation, compression, attack, memory = channel_notes(Trial(plan.blueprint, plan.population))
    epsilon = epsilon_spent(2.0, 0.01, rate=1.0, steps=4)
    start = f"privacy: ε={epsilon:.4g} at δ=0.01 by rdp, Gaussian noise with σ=2; neighbours: replace a client; it"
    assert privacy == f"{start} protects what the server sends; uploads are not protected"
    assert larger.startswith("privacy.noise_cohort=500: noise and ε are those of a deployment with cohorts of this")
    assert simulation.startswith("noise is drawn from the run's seed")
    assert compression == "compression: qsgd with feedback: a client sends 11.9 kB in place of 75.7 kB"
    assert attack.startswith("attack: minmax by 3 of 10 clients (")
    assert attack.endswith("), who are not scored")
    assert memory == "robust: centred_clipping: the server holds the updates of 10 clients, 757 kB"


def test_fields_that_pass_are_named():
    given = {"algorithm": {"name": "fedgen"}, "compression.name": "cast", "robust.name": "median"}
    plan = make_plan(Config.read(SMALL, given))
    compression, memory = channel_notes(Trial(plan.blueprint, plan.population))
    assert compression.endswith("; head are sent as they are")
    assert memory.endswith("; head are neither attacked nor compared")


def test_a_channel_is_part_of_the_name_of_a_trial_and_its_absence_is_not():
    plain = Config.read(SMALL)
    assert trial_name(plain) == trial_name(Config.read(SMALL, {"attack.name": "none", "robust.name": "mean"}))
    names = {trial_name(Config.read(SMALL, parts)) for parts in PARTS.values()}
    assert len(names | {trial_name(plain)}) == len(PARTS) + 1
    longer = {"rounds": 99}
    assert trial_name(plain) == trial_name(Config.read(SMALL, longer))
    by_epsilon = {"privacy": {"epsilon": 8, "delta": 0.01}}
    assert trial_name(Config.read(SMALL, by_epsilon)) != trial_name(Config.read(SMALL, by_epsilon, longer))
    by_sigma = {"privacy": {"sigma": 1, "delta": 0.01}}
    assert trial_name(Config.read(SMALL, by_sigma)) == trial_name(Config.read(SMALL, by_sigma, longer))


def test_options_are_columns():
    config = Config.read(
        SMALL, {"compression": {"name": "topk", "down": "cast"}, "privacy.epsilon": 8, "privacy.delta": 0.1}
    )
    tree = config.tree()
    assert tree["compression"] == {"name": "topk", "down": {"name": "cast"}}
    assert tree["privacy"] == {"name": "gaussian", "epsilon": 8.0, "delta": 0.1}
    assert (tree["attack"], tree["robust"]) == ({"name": "none"}, {"name": "mean"})


def test_a_part_of_ones_own_is_chosen_by_its_module(tmp_path, monkeypatch):
    (tmp_path / "mine_rules.py").write_text(
        "from dataclasses import dataclass\n"
        "from rayfed.channel.robust import Rule\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class First(Rule):\n"
        "    name = 'first'\n"
        "    def combine(self, updates, byzantine, memory):\n"
        "        return updates.each(lambda u: u[0]), memory\n"
    )
    monkeypatch.chdir(tmp_path)
    make_plan(Config.read(SMALL, {"robust.name": "mine_rules:First"}))
    private = {"privacy": {"sigma": 1, "delta": 0.01}, "algorithm.weighting": "equal"}
    with pytest.raises(UsageError, match=r"^robust.name=first: does not say how much one client can change it"):
        make_plan(Config.read(SMALL, {"robust.name": "mine_rules:First"}, private))
