"""A user's own images, with one folder per class, optionally inside one folder per domain or per split."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.core.paths import absolute, looked_in
from rayfed.data.dataset import Dataset
from rayfed.data.readers.class_folders import Listing, folders, image_files, loose_images, refuse_loose_images, walk
from rayfed.data.readers.files import note
from rayfed.data.sets.image_folders import ImageFiles


@dataclass(frozen=True, kw_only=True)
class ImageFolder(ImageFiles):
    """Images in `<folder>/<domain>/<class>/`, `<folder>/<class>/`, or `<folder>/train/<class>/` beside `test` or `val`.

    Every domain has the same classes, numbered in the order of their folders' names; images in folders below a class
    belong to it. Without domain folders, there is one domain, "images", and the outer folders are classes. They are
    also taken for classes if no two of them have a folder of one name, or if images lie in each, or with
    `domains=[images]`. The split is drawn (`test`), unless there are folders `train` and `test` or `val`, as
    torchvision has them: then these are the test images. With both, those of `val` are training images, of which each
    client's validation part is drawn. Folders named like splits are domains only if `domains` names them.
    """

    name: ClassVar[str] = "imagefolder"
    train_names: ClassVar[tuple[str, ...]] = ("train", "training")
    test_names: ClassVar[tuple[str, ...]] = ("test", "testing")
    val_names: ClassVar[tuple[str, ...]] = ("val", "valid", "validation")
    split_names: ClassVar[set[str]] = {*train_names, *test_names, *val_names}

    folder: str = option(help="folder that contains the folders of the domains, of the classes, or train and test")

    def available_domains(self) -> tuple[str, ...]:
        outer, inner = self._folders()
        return tuple(outer) if inner and not self._splits(outer) else ("images",)

    def load(self) -> Dataset:
        """Return the images that are kept; UsageError if folders or files are missing, or do not fit the options."""
        domains, (outer, inner) = self.selected_domains(), self._folders()
        root, classes = absolute(self.folder), tuple(inner or outer)
        if splits := self._splits(outer):
            found, is_test = walk(root, dict(enumerate(splits)), classes), list(splits.values())
            entries = [entry._replace(domain=0, is_test=is_test[entry.domain]) for entry in found]
            return self.dataset(Listing.of(root, entries), domains, len(classes), published=True)
        listing = Listing.of(root, walk(root, dict(enumerate(domains if inner else ("",))), classes))
        return self.dataset(listing, domains, len(classes), published=False)

    def _splits(self, outer: list[str]) -> dict[str, bool]:
        """Return whether each folder has test images, if all of them are splits and `domains` does not name them."""
        names = {name.lower() for name in outer}
        tests = self.test_names if names & set(self.test_names) else self.val_names
        complete = names & set(self.train_names) and names & set(tests) and names <= self.split_names
        return (
            {name: name.lower() in tests for name in outer} if complete and not set(self.domains) & set(outer) else {}
        )

    def _folders(self) -> tuple[list[str], list[str]]:
        """Return the folders in `folder` and those inside of them: domains and classes, or classes and nothing."""
        root = absolute(self.folder)
        layout = (
            "folders of domains that contain folders of classes, or folders of classes, with images in them, or "
            "train/<class> beside test/<class> or val/<class>"
        )
        if not root.is_dir():
            raise UsageError(f"data.folder={self.folder}: no such folder{looked_in(self.folder)}; expected {layout}")
        outer = folders(root)
        inner_of = {name: folders(root / name) for name in outer}
        inner = sorted({name for names in inner_of.values() for name in names})
        if not outer or not (inner or any(image_files(root / name, Counter()) for name in outer)):
            raise UsageError(f"data.folder={self.folder}: no images in folders; expected {layout}")
        if inner and self._are_classes(root, inner_of):
            return outer, []
        if inner:
            refuse_loose_images(root)
        splits = [name for name in outer if name.lower() in self.split_names]
        if inner and splits and not self.domains and not self._splits(outer):
            raise UsageError(
                f"data.folder={self.folder}: {', '.join(splits)} would be domains, but have the names of splits; "
                f"expected {layout}; put all images of a class into one folder (data.test is the share to draw), "
                f"use data.folder={root / splits[0]}, or name the domains with data.domains=[{','.join(outer)}]"
            )
        if inner and {name.lower() for name in inner} <= self.split_names:
            raise UsageError(
                f"data.folder={self.folder}: {outer[0]} has the folders {', '.join(inner)}, named like splits; "
                f"a split inside of a domain is not read; expected {layout}"
            )
        return outer, inner

    def _are_classes(self, root: Path, inner_of: dict[str, list[str]]) -> bool:
        """Return whether the outer folders are classes, although they have folders: of patients, for example."""
        if self.domains == ["images"] and "images" not in inner_of:
            return True
        if self.domains or len(inner_of) < 2 or self._splits(list(inner_of)):
            return False
        is_shared = max(Counter(name for names in inner_of.values() for name in names).values()) > 1
        if is_shared and not all(loose_images(root / name) for name in inner_of):
            return False
        names = ",".join(inner_of)
        note(f"{root}: {names} are taken for classes, with all folders below; for domains, give data.domains=[{names}]")
        return True
