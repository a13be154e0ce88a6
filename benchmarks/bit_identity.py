"""Check that the final state of the server and of all clients has the same hash on any number of hosts.

Each algorithm trains on mini_digits in this process (hosts=0) and on 1, 2 and 4 Ray hosts. The exit code is 1 if any
hash differs. Four hosts fit on two CPUs, since each reserves a quarter of a CPU.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from _rounds import results_folder

import rayfed

ALGORITHMS = ("fedavg", "scaffold", "adcol", "dbe", "fraug")
HOSTS = (0, 1, 2, 4)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS), help="values of algorithm.name")
    parser.add_argument("--hosts", nargs="+", type=int, default=list(HOSTS), help="Ray hosts; 0 runs without Ray")
    parser.add_argument("--rounds", type=int, default=2, help="communication rounds")
    parser.add_argument("--vmap-clients", type=int, default=1, help="clients that a host trains at once")
    parser.add_argument("--images", type=int, default=100, help="images per domain, of which there are five")
    args = parser.parse_args(argv)
    hashes = {}
    for algorithm in args.algorithms:
        with results_folder() as folder:
            hashes[algorithm] = {
                hosts: rayfed.run(configuration(algorithm, hosts, args, folder)).weights_hash for hosts in args.hosts
            }
        print(f"{algorithm}: done", file=sys.stderr, flush=True)
    print(table(hashes))
    return 0 if all(len(set(row.values())) == 1 for row in hashes.values()) else 1


def configuration(algorithm: str, hosts: int, args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Return a configuration with a small batch-norm network and two clients per domain."""
    options = {"mu": 0.1} if algorithm == "dbe" else {}  # batch norm needs a small μ
    return {
        "algorithm": {"name": algorithm, **options},
        "data": {"name": "mini_digits", "per_domain": args.images},
        "partition": {"name": "domains", "clients_per_domain": 2},
        "model": {"name": "digits_cnn", "width": 0.125},
        "local": {"batch_size": 8, "lr": 0.01},
        "placement": {"hosts": hosts, "cpus": 0.25, "vmap_clients": args.vmap_clients},
        "rounds": args.rounds,
        "results": os.path.join(folder, str(hosts)),
    }


def table(hashes: Mapping[str, Mapping[int, str]]) -> str:
    """Return a table with a row per algorithm and the first digits of the hash for each number of hosts."""
    width = max(map(len, [*hashes, "algorithm"]))
    placements = list(next(iter(hashes.values())))
    lines = [f"{'algorithm':<{width}}  " + "  ".join(f"{f'hosts={hosts}':<12}" for hosts in placements)]
    for name, row in hashes.items():
        verdict = "equal" if len(set(row.values())) == 1 else "DIFFERENT"
        cells = [f"{name:<{width}}", *(f"{row[hosts][:12]:<12}" for hosts in placements), verdict]
        lines.append("  ".join(cells))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
