"""Orders of published tables that their small forms have shown on every seed: a change that loses one is a defect."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.published_data import needs

COMMAND = Path(__file__).parents[2] / "benchmarks" / "papers" / "run.py"

SHOWN = {
    "adcol_extreme_skew": [
        "AVG: ADCOL mu=0.1 > FedBN + 5",
        "AVG: FedBN > FedAvg",
        "AVG: ADCOL mu=0.1 > FedAvg + 5",
    ],
    "adcol_table12_cifar10": ["accuracy: FedAvg > ADCOL + 5", "accuracy: FedAvg > SOLO + 5"],
    "adcol_table15": ["MB up a round: r = 1.0 > r = 0.6", "MB a round: FedAvg > r = 1.0"],
    "augmentation_table7": ["mean: none > rotation 15", "mean: rotation 15 > rotation 30", "mean: blur > none"],
    "feddebias_bias": ["loss on absent classes: CE > C1 + 1", "own classes: C1 > CE - 3"],
}


@pytest.mark.slow
@pytest.mark.ray
@needs("MNIST/raw")
@pytest.mark.parametrize("table", SHOWN)
def test_orders_of_a_table(table, tmp_path):
    done = subprocess.run(
        [sys.executable, str(COMMAND), table, "--small", "seeds=[0]", f"results={tmp_path}"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"RAY_ADDRESS": "local"},  # not a cluster of another test, whose nodes may die
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.removeprefix("- ") for line in done.stdout.splitlines() if line.startswith("- ")]
    verdicts = dict(line.rsplit(": ", 1) for line in lines)
    for claim in SHOWN[table]:
        assert verdicts[claim].startswith("one seed, as claimed"), f"{claim}: {verdicts[claim]}"
