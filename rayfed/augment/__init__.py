"""Augmentation of training batches. `AUGMENTS` lists the augmentations by name."""

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
