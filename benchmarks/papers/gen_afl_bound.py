"""Count how often a weight of AFL or Gen-AFL is at its lower bound, in the small form of de Luca et al.'s table 3.

python benchmarks/papers/gen_afl_bound.py                 # seed 0
python benchmarks/papers/gen_afl_bound.py --seeds 0 1 2
"""

import argparse
from collections.abc import Sequence

from _tables import read_table

from rayfed.engine.evaluation import Evaluation
from rayfed.engine.host import LocalFleet
from rayfed.engine.server import Server
from rayfed.experiments.config import Config
from rayfed.experiments.plan import make_plan
from rayfed.experiments.sources import merged


def main(argv: Sequence[str] | None = None) -> None:
    """Print, for each row, the share of weights after each round that are at the bound, and the smallest weight."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--rows", nargs="+", default=["Gen-AFL*", "AFL*"], metavar="PATTERN")
    args = parser.parse_args(argv)
    seeds, patterns = args.seeds, args.rows
    table = read_table("augmentation_table3")
    space = table.space("small", {}, patterns)
    for (row, _), (keys,) in zip(table.cells("small", patterns), space.arms, strict=True):
        values = []
        for seed in seeds:
            plan = make_plan(Config.read(merged(keys, {"seed": seed})))
            blueprint, population = plan.blueprint, plan.population
            server = Server(
                blueprint, population, LocalFleet(blueprint, population), Evaluation(every=blueprint.rounds)
            )
            values += [server.state["lambda"].clone() for record in server.run() if record.round]
        lowest = plan.config.algorithm.lambda_min  # type: ignore[attr-defined] # of Gen-AFL and AFL
        bound = sum(int((weights <= lowest + 1e-9).sum()) for weights in values)
        smallest = min(float(weights.min()) for weights in values)
        count = sum(len(weights) for weights in values)
        print(f"{row:<14} at the bound of {lowest:g}: {bound} of {count}; smallest {smallest:.3f}", flush=True)


if __name__ == "__main__":
    main()
