"""Augmentation of training batches, one file a family; `AUGMENTS` is all that knows them by name."""

AUGMENTS = {
    "none": "rayfed.augment.base:NoAugment",
    "rotation": "rayfed.augment.geometry:Rotation",
    "hflip": "rayfed.augment.geometry:HorizontalFlip",
    "crop": "rayfed.augment.geometry:Crop",
    "blur": "rayfed.augment.blur:Blur",
    "weak": "rayfed.augment.schemes:Weak",
    "moderate": "rayfed.augment.schemes:Moderate",
    "noise": "rayfed.augment.noise:Noise",
}
