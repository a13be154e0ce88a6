"""The configuration tree: where values come from, which win, and what they become."""

import copy
import dataclasses
import pickle

import pytest
import torch

from rayfed.algorithms import ALGORITHMS
from rayfed.algorithms.fedprox import FedProx
from rayfed.algorithms.scaffold import Scaffold
from rayfed.core.errors import UsageError
from rayfed.core.lr_schedule import Step
from rayfed.core.optim import Adam
from rayfed.experiments.config import Config
from rayfed.experiments.given import Given
from rayfed.experiments.plan import make_plan
from rayfed.experiments.plan_identity import trial_name
from rayfed.experiments.sources import from_arguments, from_file, merged

MINE = """
from dataclasses import dataclass
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.options import option

@dataclass(frozen=True, kw_only=True)
class Mine(FedAvg):
    strength: float = option(1.0, low=0, help="of my idea")

class Bare:
    pass

from torch import nn

class MyNet(nn.Sequential):
    def __init__(self, shape, num_classes, width=4):
        pixels = shape[0] * shape[1] * shape[2]
        super().__init__(nn.Flatten(), nn.Linear(pixels, width), nn.ReLU(), nn.Linear(width, num_classes))
"""


def written(*pairs):
    return Config.read(from_arguments(pairs))


def refusal(*pairs):
    with pytest.raises(UsageError) as caught:
        written(*pairs)
    return str(caught.value)


FEDPROX = {"name": "fedprox", "mu": 0.3}


class TestMerging:
    def test_nested_and_dotted_keys_are_the_same(self):
        nested = {"local": {"lr": 0.5, "epochs": 2}, "algorithm": {"name": "fedprox", "mu": 0.3}}
        dotted = {"local.lr": 0.5, "local.epochs": 2, "algorithm.name": "fedprox", "algorithm.mu": 0.3}
        assert merged(nested) == merged(dotted) == nested
        assert Config.read(nested) == Config.read(dotted)

    @pytest.mark.parametrize(
        ("sources", "expected"),
        [
            (  # later sources win, and groups are merged key by key
                [{"local": {"lr": 0.1, "epochs": 2}}, {"local.lr": 0.2}, {"local": {"batch_size": 4}}],
                {"local": {"lr": 0.2, "epochs": 2, "batch_size": 4}},
            ),
            (  # a new name clears the options of the old name
                [{"algorithm": {"name": "fedprox", "mu": 0.3}}, {"algorithm.name": "scaffold"}],
                {"algorithm": {"name": "scaffold"}},
            ),
            *(
                ([{"algorithm": {"name": "scaffold", "lr": 1}}, source], {"algorithm": {"name": "fedprox", "mu": 0.3}})
                for source in (
                    {"algorithm.mu": 0.3, "algorithm.name": "fedprox"},
                    {"algorithm": {"mu": 0.3, "name": "fedprox"}},
                    {"algorithm": {"name": "fedprox"}, "algorithm.mu": 0.3},
                    {"algorithm.mu": 0.3, "algorithm": {"name": "fedprox"}},
                )
            ),
            *(
                ([{"algorithm.name": "fedavg"}, source], {"algorithm": {"name": "dbe", "base": FEDPROX}})
                for source in (
                    {"algorithm.base.mu": 0.3, "algorithm.base.name": "fedprox", "algorithm.name": "dbe"},
                    {"algorithm.base.mu": 0.3, "algorithm": {"base": {"name": "fedprox"}, "name": "dbe"}},
                )
            ),
        ],
    )
    def test_names_clear_options_of_other_names(self, sources, expected):
        before = copy.deepcopy(sources)
        assert merged(*sources) == expected
        assert sources == before

    def test_precedence_of_file_and_arguments(self, tmp_path):
        file = tmp_path / "a.yaml"
        file.write_text("rounds: 3\nlocal: {lr: 0.5, batch_size: 7}\nalgorithm.name: fedprox\n")
        config = Config.read(from_file(file), from_arguments(["local.lr=0.25", "algorithm.mu=0.125"]))
        assert (config.rounds, config.local.lr, config.local.batch_size) == (3, 0.25, 7)
        assert config.algorithm == FedProx(mu=0.125)


class TestArguments:
    def test_values_are_yaml(self):
        given = from_arguments(["a=1", "b=0.5", "c=true", "d=null", "e=[1, 2]", "f=text", "g=", "h={x: 1}", "i=a=b"])
        expected = {"a": 1, "b": 0.5, "c": True, "d": None, "e": [1, 2], "f": "text", "g": None, "h": {"x": 1}}
        assert given == {**expected, "i": "a=b"}

    def test_scientific_notation_is_a_number_whatever_yaml_says(self):
        assert from_arguments(["lr=1e-3"]) == {"lr": "1e-3"}  # YAML 1.1 wants 1.0e-3
        assert written("local.lr=1e-3").local.lr == 0.001
        assert type(written("local.lr=1e-3").local.lr) is float

    def test_a_comment_is_none_so_that_no_part_of_a_text_is_lost(self):
        given = from_arguments(["a=lr sweep #2", "b=#2", "c='x #2'", "d=x#2", "e=[1, 2] # two", "f=3 #"])
        expected = {"a": "lr sweep #2", "b": "#2", "c": "x #2", "d": "x#2", "e": "[1, 2] # two", "f": "3 #"}
        assert given == expected
        assert written("experiment=lr sweep #2").experiment == "lr sweep #2"
        assert refusal("rounds=3 # few") == "rounds='3 # few': expected an integer, got str"


A_MAPPING = "expected a mapping, as in metrics.ece=true or metrics.ece.every=5"


class TestTypes:
    def test_whole_numbers_stand_for_floats_and_back_only_without_loss(self):
        assert type(written("local.lr=1").local.lr) is float
        assert type(written("rounds=3.0").rounds) is int
        assert refusal("rounds=3.5") == "rounds=3.5: expected an integer, got float"

    @pytest.mark.parametrize(
        ("pair", "message"),
        [
            ("rounds=many", "rounds='many': expected an integer, got str"),
            ("rounds=true", "rounds=True: expected an integer, got bool"),
            ("evaluate.points=global", "evaluate.points='global': expected a list of strings or null, got str"),
            ("local=3", "local=3: expected a mapping; it has keys such as local.epochs"),
            ("algorithm=fedavg", "algorithm='fedavg': expected a mapping; did you mean algorithm.name=fedavg?"),
            ("algorithm.name=3", "algorithm.name=3: expected a string, got int"),
            ("local.momentum=1", "local.momentum=1.0: must be less than 1"),
            ("local.lr=.nan", "local.lr=nan: must be a finite number"),
            ("metrics.mdl.seedz=1", "metrics.mdl.seedz: no such key; did you mean metrics.mdl.seeds"),
            ("metrics.ecee=true", "metrics.ecee: no such metric; did you mean metrics.ece? (your own is written"),
            ("metrics.ece.bin=3", "metrics.ece.bin: no such key; did you mean metrics.ece.bins?"),
            ("metrics.ece.bins=0", "metrics.ece.bins=0: must be at least 1"),
            ("metrics.ece.every=0", "metrics.ece.every=0: must be at least 1"),
            ("metrics.ece=3", "metrics.ece=3: expected true, or a mapping of options such as every"),
            ("metrics=[ece, mdl]", f"metrics=ece, mdl: {A_MAPPING}"),
            ("augment={name: noise, sd: 1}", "augment.sd: no such key"),
            ("evaluate.points=[global, everything]", "evaluate.points='everything': known: adapted, downloaded"),
        ],
    )
    def test_what_does_not_fit_is_refused_in_one_line(self, pair, message):
        assert refusal(pair).startswith(message)


class TestCohort:
    @pytest.mark.parametrize(
        ("text", "clients"),
        [("cohort=3", 3), ("cohort=1", 1), ("cohort_share=1", 5), ("cohort_share=0.5", 2), ("seed=0", 5)],
    )
    def test_is_a_number_or_a_share(self, text, clients):
        assert make_plan(written(text, "model.name=mlp")).blueprint.cohort == clients


class TestAlgorithm:
    def test_a_base_is_an_algorithm_however_it_is_written(self):
        for pairs in (
            ("algorithm.base=scaffold", "algorithm.base.server_lr=0.5"),
            ("algorithm.base={name: scaffold, server_lr: 0.5}",),
            ("algorithm.base.name=scaffold", "algorithm.base.server_lr=0.5"),
        ):
            assert written("algorithm.name=dbe", *pairs).algorithm.base == Scaffold(server_lr=0.5)
        assert written("algorithm.name=dbe", "algorithm.base=scaffold").algorithm.base == Scaffold()

    def test_errors_in_a_base_name_the_whole_key(self):
        message = refusal("algorithm.name=dbe", "algorithm.base={name: scaffold, server_rl: 0.5}")
        assert message == "algorithm.base.server_rl: no such key; did you mean algorithm.base.server_lr?"
        assert refusal("algorithm.name=dbe", "algorithm.base=[a]").startswith("algorithm.base=['a']: expected a string")
        assert "algorithm.base.name=scafold" in refusal("algorithm.name=dbe", "algorithm.base=scafold")

    def test_the_users_own(self, here):
        (here / "config_mine.py").write_text(MINE)
        config = written("algorithm.name=config_mine:Mine", "algorithm.strength=2")
        assert type(config.algorithm).__name__ == "Mine"
        assert config.algorithm.strength == 2.0
        assert trial_name(config).startswith("Mine-seed0-")
        assert refusal("algorithm.name=config_mine:Mine", "algorithm.strength=-1").startswith("algorithm.strength=-1.0")
        assert "must be a dataclass that derives from" in refusal("algorithm.name=config_mine:Bare")

    @pytest.mark.parametrize(
        ("key", "base"),
        [
            ("algorithm.name", "rayfed.algorithms.fedprox.FedProx"),
            ("data.name", "rayfed.data.sets.mini_digits.MiniDigits"),
            ("metrics", "rayfed.metrics.base.OfPredictions"),
        ],
    )
    def test_options_of_a_class_without_the_decorator_are_refused(self, here, key, base):
        module, name = base.rsplit(".", 1)
        text = f"from {module} import {name} as Base\nfrom rayfed.core.options import option\n"
        text += "class Bare(Base):\n    shrink: bool = option(False, help='')\nclass Same(Base):\n    pass\n"
        text += "class Below(Bare):\n    pass\n"
        own = f"config_bare_{name.lower()}"
        (here / f"{own}.py").write_text(text)
        for wrong in ("Bare", "Below"):
            pair = f"metrics.{own}:{wrong}=true" if key == "metrics" else f"{key}={own}:{wrong}"
            with pytest.raises(UsageError) as caught:
                make_plan(written(pair))
            message = str(caught.value)
            assert f"{own}:Bare declares shrink but is not a dataclass; decorate it with @dataclass(" in message
        written(f"metrics.{own}:Same=true" if key == "metrics" else f"{key}={own}:Same")

    def test_the_users_own_model(self, here):
        (here / "config_net.py").write_text(MINE)
        for method, split in (("fedrep", (6,)), ("fedavg", ())):
            plan = make_plan(written(f"algorithm.name={method}", "model.name=config_net:MyNet", "model.width=6"))
            assert plan.blueprint.context(plan.population, "cpu").task.feature_shape == split


class TestTree:
    @pytest.mark.parametrize("name", sorted(ALGORITHMS))
    def test_round_trip_of_every_algorithm(self, name):
        config = written(f"algorithm.name={name}")
        assert config.algorithm.name == name
        assert Config.read(config.tree()).tree() == config.tree()

    def test_a_copy_for_another_process_holds_plain_values(self):
        config = written("algorithm.name=dbe", "algorithm.base=scaffold", "metrics.ece=true", "model.width=1")
        built = config.algorithm, config.metrics
        copied = pickle.loads(pickle.dumps(dataclasses.replace(config)))
        assert not {"algorithm", "metrics"} & vars(copied).keys()
        assert (copied.algorithm, copied.metrics) == built
        assert type(copied.model.options["width"]) is float  # as it was checked


class TestTrialNames:
    def test_placement_and_bookkeeping_do_not_change_them(self):
        name = trial_name(written())
        same = ("rounds=3", "placement.hosts=2", "placement.data_on_device=true", "checkpoint.every=1", "results=r")
        assert all(trial_name(written(pair)) == name for pair in same)

    def test_whatever_changes_the_outcome_changes_them(self):
        pairs = (
            "seed=0",
            "seed=1",
            "local.lr=0.1",
            "placement.vmap_clients=2",
            "placement.vmap_clients=auto",
            "placement.threads=2",
            "placement.deterministic=true",
            "placement.tf32=true",
            "data.seed=1",
        )
        assert len({trial_name(written(pair)) for pair in pairs}) == len(pairs)


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (["lr_schedule.name=exponential"], "lr_schedule.decay: required (factor per round"),
        (["lr_schedule={name: cosine, every: 3}"], "lr_schedule.every: no such key"),
        (["availability.deadline=3"], "availability.deadline=3: needs a clock; give clock.step_seconds, such as 1"),
        (["availability.step_seconds=3"], "availability.step_seconds: no such key; known: deadline"),
        (["clock.speed_spread=1"], "clock.speed_spread=1: needs a clock; give clock.step_seconds, such as 1"),
        (["clock.server_seconds=1"], "clock.server_seconds=1: needs a clock; give clock.step_seconds, such as 1"),
        (["clock.profile=f.csv", "clock.up_mbps=2"], "clock.up_mbps=2: clock.profile says this of every client"),
        (["clock.up_mbps=0"], "clock.up_mbps=0.0: must be more than 0"),
        (["schedule.name=buffered", "schedule.buffer=2"], "schedule.concurrency: required (clients that train at a"),
        (["schedule.name=buffer"], "schedule.name=buffer: did you mean buffered?"),
        (["schedule.buffer=2"], "schedule.buffer: no such key; known: name"),
        (["schedule={name: buffered, concurrency: 2, buffer: 1}", "cohort=2"], "cohort: schedule.concurrency and"),
        (["local.optimizer=adam", "local.momentum=0.9"], "local.momentum: Adam has no momentum option"),
        (["local.nesterov=true"], "local.nesterov=true: needs momentum; give local.momentum"),
        (["cohort=2", "cohort_share=0.5"], "cohort=2 and cohort_share=0.5 are both given"),
        (["local.epochs=1", "local.steps=3"], "local.epochs=1 and local.steps=3 are both given"),
        (["sampling.name=by_sise"], "sampling.name=by_sise: did you mean by_size?"),
        (["sampling.candidates=3"], "sampling.candidates: no such key"),
    ],
)
def test_options_of_training_that_cannot_work_are_refused(pairs, message):
    assert refusal(*pairs).startswith(message)


def test_what_the_options_of_training_build():
    pairs = ["local.optimizer=adamw", "local.weight_decay=0.1", "local.clip_norm=2", "local.label_smoothing=0.1"]
    schedule = ["lr_schedule={name: step, decay: 0.1, every: 5, warmup: 2}"]
    plan = make_plan(written(*pairs, *schedule, "model.name=mlp")).blueprint
    assert plan.optimizer == Adam(lr=0.01, weight_decay=0.1, clip_norm=2.0, decoupled=True)
    assert plan.schedule == Step(decay=0.1, every=5, warmup=2)
    logits, y = torch.tensor([[2.0, 0.0, 1.0]]), torch.tensor([0])
    target = torch.tensor([[0.9 + 0.1 / 3, 0.1 / 3, 0.1 / 3]])
    assert plan.training_loss(logits, y).item() == pytest.approx(-(target * logits.log_softmax(1)).sum().item())
    with pytest.raises(UsageError, match=r"^local.label_smoothing=0.1: smooths the labels of cross-entropy, and"):
        make_plan(written("local.label_smoothing=0.1", "model.name=mlp"), Given(loss=lambda logits, y: logits.sum()))
