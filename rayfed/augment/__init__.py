"""Augmentation of training batches. `AUGMENTS` lists the augmentations by name."""

AUGMENTS = {
    "none": "rayfed.augment.base:NoAugment",
    "rotation": "rayfed.augment.images:Rotation",
    "hflip": "rayfed.augment.images:HorizontalFlip",
    "crop": "rayfed.augment.images:Crop",
    "blur": "rayfed.augment.images:Blur",
    "weak": "rayfed.augment.images:Weak",
    "moderate": "rayfed.augment.images:Moderate",
    "noise": "rayfed.augment.base:Noise",
}
