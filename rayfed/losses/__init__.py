"""Losses by name. `LOSSES` lists them; they are chosen as `loss.name`, or `module:Name` for one of the user's own."""

LOSSES = {
    "cross_entropy": "rayfed.losses.base:CrossEntropy",
    "bce_with_logits": "rayfed.losses.base:BceWithLogits",
    "mse": "rayfed.losses.base:Mse",
    "l1": "rayfed.losses.base:L1",
    "smooth_l1": "rayfed.losses.base:SmoothL1",
    "cox": "rayfed.losses.survival:Cox",
}
