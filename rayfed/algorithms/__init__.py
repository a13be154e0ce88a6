"""The algorithms, one file each; the table is all that knows them by name."""

ALGORITHMS = {
    "solo": "rayfed.algorithms.solo:Solo",
    "fedavg": "rayfed.algorithms.fedavg:FedAvg",
    "fedprox": "rayfed.algorithms.fedprox:FedProx",
    "fedbn": "rayfed.algorithms.fedbn:FedBN",
    "scaffold": "rayfed.algorithms.scaffold:Scaffold",
    "moon": "rayfed.algorithms.moon:Moon",
    "fedrep": "rayfed.algorithms.fedrep:FedRep",
    "ditto": "rayfed.algorithms.ditto:Ditto",
    "afl": "rayfed.algorithms.afl:AFL",
    "gen_afl": "rayfed.algorithms.afl:GenAFL",
    "vm": "rayfed.algorithms.vm:VM",
    "adcol": "rayfed.algorithms.adcol:Adcol",
    "dbe": "rayfed.algorithms.dbe:DBE",
    "feddebias": "rayfed.algorithms.feddebias:FedDebias",
    "fraug": "rayfed.algorithms.fraug:FRAug",
}
