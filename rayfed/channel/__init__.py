"""What travels between clients and server: privacy, compression, attacks and robust rules, on any method.

`exchange` puts the four around a method's exchanges; each has a module and a table of names here.
"""

PRIVACIES = {
    "none": "rayfed.channel.none:NoPrivacy",
    "gaussian": "rayfed.channel.privacy:Gaussian",
    "laplace": "rayfed.channel.privacy:Laplace",
}

COMPRESSIONS = {
    "none": "rayfed.channel.none:NoCompression",
    "topk": "rayfed.channel.compression:TopK",
    "randk": "rayfed.channel.compression:RandK",
    "qsgd": "rayfed.channel.compression:Qsgd",
    "sign": "rayfed.channel.compression:Sign",
    "cast": "rayfed.channel.compression:Cast",
}

ATTACKS = {
    "none": "rayfed.channel.none:NoAttack",
    "label_flip": "rayfed.channel.attacks:LabelFlip",
    "noise": "rayfed.channel.attacks:Noise",
    "sign_flip": "rayfed.channel.attacks:SignFlip",
    "scale": "rayfed.channel.attacks:Scale",
    "alie": "rayfed.channel.attacks:Alie",
    "ipm": "rayfed.channel.attacks:Ipm",
    "minmax": "rayfed.channel.attacks:MinMax",
    "minsum": "rayfed.channel.attacks:MinSum",
    "backdoor": "rayfed.channel.attacks:Backdoor",
}

RULES = {
    "mean": "rayfed.channel.robust:Mean",
    "norm_bound": "rayfed.channel.robust:NormBound",
    "median": "rayfed.channel.robust:Median",
    "trimmed_mean": "rayfed.channel.robust:TrimmedMean",
    "krum": "rayfed.channel.robust:Krum",
    "bulyan": "rayfed.channel.robust:Bulyan",
    "geometric_median": "rayfed.channel.robust:GeometricMedian",
    "centred_clipping": "rayfed.channel.robust:CentredClipping",
}
