"""A user's own images, with one folder per class, optionally inside one folder per domain."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.data.dataset import Dataset
from rayfed.data.readers.class_folders import Listing, folders, image_files, walk
from rayfed.data.sets.image_domains import ImageFiles


@dataclass(frozen=True, kw_only=True)
class ImageFolder(ImageFiles):
    """Images in `<folder>/<domain>/<class>/` or `<folder>/<class>/`; every domain has the same classes.

    The split is drawn (`test`), so folders named like splits are refused as domains unless `domains` names them.
    Classes are numbered in the order of their folders' names. Without domain folders, there is one domain, "images".
    """

    name: ClassVar[str] = "imagefolder"
    splits: ClassVar[tuple[str, ...]] = ("train", "training", "test", "testing", "val", "valid", "validation")

    folder: str = option(help="folder that contains the folders of the domains, or of the classes")

    def available_domains(self) -> tuple[str, ...]:
        outer, inner = self._folders()
        return tuple(outer) if inner else ("images",)

    def load(self) -> Dataset:
        """Return the images that are kept.

        Raises:
            UsageError: Folders or files are missing, empty or damaged, or an option does not match them.
        """
        domains, (outer, inner) = self.selected_domains(), self._folders()
        root, classes = Path(self.folder).expanduser(), tuple(inner or outer)
        domain_folders = dict(enumerate(domains if inner else ("",)))
        return self.dataset(Listing.of(root, walk(root, domain_folders, classes)), domains, len(classes))

    def _folders(self) -> tuple[list[str], list[str]]:
        """Return the folders in `folder` and those inside of them: domains and classes, or classes and nothing."""
        root = Path(self.folder).expanduser()
        layout = "folders of domains that contain folders of classes, or folders of classes, with images in them"
        if not root.is_dir():
            raise UsageError(f"data.folder={self.folder}: no such folder; expected {layout}")
        outer = folders(root)
        inner = sorted({name for first in outer for name in folders(root / first)})
        if not outer or not (inner or any(image_files(root / name) for name in outer)):
            raise UsageError(f"data.folder={self.folder}: no images in folders; expected {layout}")
        split_names = [name for name in outer if name.lower() in self.splits]
        if inner and split_names and not self.domains:
            raise UsageError(
                f"data.folder={self.folder}: {', '.join(split_names)} would be domains, but have the names of splits; "
                f"expected {layout}; put all images of a class into one folder (data.test is the share to draw), "
                f"use data.folder={root / split_names[0]}, or name the domains with data.domains=[{','.join(outer)}]"
            )
        return outer, inner
