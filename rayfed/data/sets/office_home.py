"""OfficeHome: objects of office and home in four domains."""

from dataclasses import dataclass
from typing import ClassVar

from rayfed.core.options import option
from rayfed.data.normalisation import IMAGENET_MEAN, IMAGENET_STD
from rayfed.data.sets.image_domains import DomainFolders


@dataclass(frozen=True, kw_only=True)
class OfficeHome(DomainFolders):
    """OfficeHome: 15,588 images of 65 classes in four domains (Venkateswara et al. 2017, "Deep Hashing Network for
    Unsupervised Domain Adaptation").

    From https://www.hemanthdv.org/officeHomeDataset.html: `OfficeHomeDataset_10072016/Real World/Alarm_Clock/*.jpg`.
    For non-commercial research and education.
    """

    name: ClassVar[str] = "office_home"
    dataset_folders: ClassVar[tuple[str, ...]] = ("OfficeHomeDataset_10072016", "OfficeHome", "office_home")
    folders: ClassVar[dict[str, tuple[str, ...]]] = {
        "art": ("Art", "art"),
        "clipart": ("Clipart", "clipart"),
        "product": ("Product", "product"),
        "real_world": ("Real World", "Real_World", "RealWorld", "real_world"),
    }
    count: ClassVar[int] = 65
    url: ClassVar[str] = "https://www.hemanthdv.org/officeHomeDataset.html"

    size: int = option(224, low=8, help="side to which images are resized")
    mean: list[float] = option(IMAGENET_MEAN, help="subtracted from images in [0, 1]; one number or three")
    std: list[float] = option(IMAGENET_STD, above=0, help="images are divided by it; one number or three")
