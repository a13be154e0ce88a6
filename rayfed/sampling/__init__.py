"""Client sampling: which clients take part in a round. `SAMPLERS` lists the rules by name."""

SAMPLERS = {
    "uniform": "rayfed.sampling.base:Uniform",
    "by_size": "rayfed.sampling.base:BySize",
    "power_of_choice": "rayfed.sampling.base:PowerOfChoice",
}
