"""The traits of algorithms: a subclass changes one on top of its base's, a wrapper has those of its base."""

import re
from dataclasses import dataclass, fields, replace
from pathlib import Path

import pytest

import rayfed
from rayfed.algorithm import TRAITS, Algorithm, Traits
from rayfed.algorithms.dbe import DBE
from rayfed.algorithms.fedavg import FedAvg
from rayfed.algorithms.fedbn import FedBN
from rayfed.algorithms.fedfomo import FedFomo
from rayfed.algorithms.mixup import Mixup
from rayfed.cli.main import main
from rayfed.core.errors import UsageError


def test_a_subclass_changes_one_trait_on_top_of_its_base():
    @dataclass(frozen=True, kw_only=True)
    class Mine(FedBN):
        traits = replace(FedBN.traits, requires_classes=True)

    assert Mine().traits == Traits(
        supports_loss_terms=True, keeps_optimizer=False, default_eval_point="downloaded", requires_classes=True
    )
    assert not FedBN.traits.requires_classes


@pytest.mark.parametrize(("name", "value"), [("requires_classes", True), ("default_eval_point", "trained")])
def test_a_trait_as_an_attribute_of_its_own_is_refused(name, value):
    """It would be ignored."""
    with pytest.raises(UsageError, match=rf"Mine: {name} is one of the traits; .*replace\(FedAvg\.traits, {name}=…\)$"):
        type("Mine", (FedAvg,), {name: value})


def test_a_module_with_one_is_refused_in_one_line(here):
    text = "from rayfed.algorithms.fedavg import FedAvg\n\n\nclass Old(FedAvg):\n    requires_classes = True\n"
    (here / "outdated.py").write_text(text)
    with pytest.raises(UsageError) as refused:
        rayfed.run({"algorithm.name": "outdated:Old"})
    assert "requires_classes is one of the traits" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_unknown_trait_is_refused_by_python():
    with pytest.raises(TypeError, match="requires_clases"):
        replace(FedAvg.traits, requires_clases=True)


def test_a_wrapper_has_the_traits_of_its_base_and_its_own():
    over_fedbn = Mixup(base=FedBN())
    assert over_fedbn.traits == replace(FedBN.traits, computes_with_inputs=True, mixes_labels=True)
    nested = Mixup(base=DBE(base=FedBN(), prbm=False))
    assert nested.traits == replace(over_fedbn.traits, needs_split=True)
    assert Mixup(base=FedFomo(rating_share=0.3)).held_out_share == 0.3


def test_rayfed_list_says_what_differs_from_the_defaults(capsys):
    assert main(["list", "scaffold"]) == 0
    traits = "traits: supports_loss_terms = true; assumes_uniform_sampling = true; keeps_optimizer = false\n"
    assert traits in capsys.readouterr().out


def test_the_page_has_a_row_for_every_trait_with_its_default():
    page = (Path(rayfed.__file__).parents[1] / "docs/extending.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| `([^`]*)`", page, re.MULTILINE))
    assert {name: rows.get(name) for name in TRAITS} == {
        field.name: repr(field.default).replace("'", '"') for field in fields(Algorithm.traits)
    }
