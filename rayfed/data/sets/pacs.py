"""PACS: photographs, art paintings, cartoons and sketches."""

from dataclasses import dataclass
from typing import ClassVar

from rayfed.core.options import option
from rayfed.data.normalisation import IMAGENET_MEAN, IMAGENET_STD
from rayfed.data.sets.image_domains import DomainFolders


@dataclass(frozen=True, kw_only=True)
class Pacs(DomainFolders):
    """PACS: 9,991 images of 7 classes in four domains (Li, Yang, Song and Hospedales 2017, "Deeper, Broader and Artier
    Domain Generalization").

    From https://dali-dl.github.io/project_iccv2017.html: `PACS/art_painting/dog/*.jpg`, also below `PACS/kfold`. No
    licence is stated; for research.
    """

    name: ClassVar[str] = "pacs"
    dataset_folders: ClassVar[tuple[str, ...]] = ("PACS/kfold", "PACS", "pacs/kfold", "pacs")
    folders: ClassVar[dict[str, tuple[str, ...]]] = {
        name: (name,) for name in ("photo", "art_painting", "cartoon", "sketch")
    }
    classes: ClassVar[tuple[str, ...]] = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
    count: ClassVar[int] = 7
    url: ClassVar[str] = "https://dali-dl.github.io/project_iccv2017.html"

    size: int = option(224, low=8, help="side to which images are resized; FedDebias: 32")
    mean: list[float] = option(IMAGENET_MEAN, help="subtracted from images in [0, 1]; one number or three")
    std: list[float] = option(IMAGENET_STD, above=0, help="images are divided by it; one number or three")
