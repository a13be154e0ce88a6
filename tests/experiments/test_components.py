"""Options of components are checked before anything is built."""

import pytest

from rayfed.core.errors import UsageError
from rayfed.experiments.components import description
from rayfed.experiments.config import Config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"algorithm.base.muu": 1, "algorithm.name": "mixup", "algorithm.base.name": "fedprox"}, "algorithm.base.muu"),
        ({"algorithm": {"name": "mixup", "base": "fedporx"}}, "algorithm.base.name=fedporx: did you mean fedprox"),
        ({"algorithm": {"name": "dp_adcol", "setting": "x"}}, "algorithm.setting: no such key"),
        ({"metrics.mdl.seedz": 1}, "metrics.mdl.seedz: no such key; did you mean metrics.mdl.seeds"),
        ({"partition.alpha": 1}, "partition.alpha: no such key"),
        ({"data.name": "npz", "partition.alpha": 1, "data.file": "x"}, "partition.alpha: no such key"),
        ({"data.name": "npz"}, "data.file: required"),
        ({"augment.name": "noise", "augment.sd": 1}, "augment.sd: no such key"),
    ],
)
def test_mistakes_are_found(values, message):
    with pytest.raises(UsageError, match=f"^{message}"):
        Config.read(values)


def test_data_and_models_of_the_users_own_are_passed_over():
    Config.read({"model": {"name": "nowhere:Net", "x": 1}, "data.name": "no:Data"})


def test_a_description_has_no_signature_that_dataclasses_wrote():
    assert "FedProx(" not in description("algorithm", "fedprox")
    assert description("metrics", "frechet").startswith("`frechet`: the distance")
