"""Office-Caltech-10: the ten classes that Office-31 and Caltech-256 share."""

from dataclasses import dataclass
from typing import ClassVar

from rayfed.data.sets.fedbn_lists import FedBnLists


@dataclass(frozen=True, kw_only=True)
class OfficeCaltech10(FedBnLists):
    """Office-Caltech-10: 2,533 images of 10 classes in four domains (Gong, Shi, Sha and Grauman 2012, "Geodesic Flow
    Kernel for Unsupervised Domain Adaptation").

    From the links in https://github.com/med-air/FedBN: `office_caltech_10/amazon/back_pack/*.jpg`, and beside
    the folders, for split=published, `amazon_train.pkl`, `amazon_test.pkl`, … No licence is stated; for research.
    """

    name: ClassVar[str] = "office_caltech10"
    dataset_folders: ClassVar[tuple[str, ...]] = ("office_caltech_10", "office_caltech10", "OfficeCaltech10")
    folders: ClassVar[dict[str, tuple[str, ...]]] = {
        name: (name, name.capitalize()) for name in ("amazon", "caltech", "dslr", "webcam")
    }
    classes: ClassVar[tuple[str, ...]] = (
        "back_pack", "bike", "calculator", "headphones", "keyboard",
        "laptop_computer", "monitor", "mouse", "mug", "projector",
    )  # fmt: skip
    count: ClassVar[int] = 10
    url: ClassVar[str] = "https://github.com/med-air/FedBN"
