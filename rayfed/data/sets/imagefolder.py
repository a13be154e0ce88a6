"""A user's own images: a folder a class, and above these, if there are several domains, a folder a domain."""

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

    Folders named as splits are not taken for domains, unless `domains` names them: the split is drawn (`test`).
    Classes are numbered in the order of their folders' names. Without domains, all is one domain called "images".
    """

    name: ClassVar[str] = "imagefolder"
    splits: ClassVar[tuple[str, ...]] = ("train", "training", "test", "testing", "val", "valid", "validation")

    folder: str = option(help="the folder that holds the domains, or the classes")

    def available_domains(self) -> tuple[str, ...]:
        outer, inner = self._folders()
        return tuple(outer) if inner else ("images",)

    def load(self) -> Dataset:
        """The images that are kept.

        Raises:
            UsageError: folders or files that are missing, empty or damaged, or an option that does not fit them.
        """
        domains, (outer, inner) = self.selected_domains(), self._folders()
        root, classes = Path(self.folder).expanduser(), tuple(inner or outer)
        inside = dict(enumerate(domains if inner else ("",)))
        return self.dataset(Listing.of(root, walk(root, inside, classes)), domains, len(classes))

    def _folders(self) -> tuple[list[str], list[str]]:
        """The folders in `folder`, and the folders in these: domains and classes, or classes and none."""
        root = Path(self.folder).expanduser()
        layout = "folders of domains with folders of classes in them, or folders of classes, and images in these"
        if not root.is_dir():
            raise UsageError(f"data.folder={self.folder}: no such folder; expected {layout}")
        outer = folders(root)
        inner = sorted({name for first in outer for name in folders(root / first)})
        if not outer or not (inner or any(image_files(root / name) for name in outer)):
            raise UsageError(f"data.folder={self.folder}: no images in folders; expected {layout}")
        as_splits = [name for name in outer if name.lower() in self.splits]
        if inner and as_splits and not self.domains:
            raise UsageError(
                f"data.folder={self.folder}: {', '.join(as_splits)} would be domains, but named as a split; expected "
                f"{layout}; put all images of a class into one folder (data.test is the share that is drawn), give "
                f"data.folder={root / as_splits[0]}, or name the domains with data.domains=[{','.join(outer)}]"
            )
        return outer, inner
