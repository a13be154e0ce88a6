"""Client sampling: which clients take part in a round. `SAMPLERS` lists the rules by name."""

SAMPLERS = {
    "uniform": "rayfed.sampling.base:Uniform",
    "without_replacement": "rayfed.sampling.base:WithoutReplacement",
    "poisson": "rayfed.sampling.base:Poisson",
    "by_size": "rayfed.sampling.base:BySize",
    "power_of_choice": "rayfed.sampling.base:PowerOfChoice",
}
