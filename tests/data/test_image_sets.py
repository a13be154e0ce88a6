"""Each set of images, written small in its published form, becomes a population of the right domains and classes."""

import os
import re
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from helpers import image_sets
from helpers.image_sets import WRITERS, options, picture
from rayfed.core.errors import UsageError
from rayfed.core.registry import resolve
from rayfed.data.dataset_options import DomainSampling
from rayfed.data.loading import load
from rayfed.data.readers import decoding
from rayfed.data.readers.files import print_once
from rayfed.data.sets import DATASETS


@pytest.fixture(autouse=True)
def a_new_process():
    """Every note is printed once in a process."""
    print_once.cache_clear()


def made(name, root, **others):
    """The dataset as it is before it is divided."""
    return resolve(name, DATASETS, where="data")(**options(name, root, **others)).load()


SHAPES = {  # images in all, clients, classes, side
    "digits5": (285, 5, 10, 28),
    "pacs": (140, 4, 7, 224),
    "office_home": (520, 4, 65, 16),
    "office_caltech10": (200, 4, 10, 64),
    "domainnet10": (300, 6, 10, 64),
    "tiny_imagenet": (202, 20, 200, 64),
    "camelyon17": (30, 3, 2, 96),
    "rxrx1": (88, 4, 1139, 256),
    "cifar10": (46, 20, 10, 32),
    "rotated_cifar10": (40, 10, 10, 32),
    "rotated_cifar100": (120, 10, 100, 32),
    "cifar100": (230, 20, 100, 32),
    "imagefolder": (30, 2, 3, 64),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_set_becomes_clients(roots, name):
    size, clients, classes, side = SHAPES[name]
    dataset = made(name, roots(name))
    assert (dataset.images.shape, dataset.images.dtype) == ((size, 3, side, side), np.uint8)
    assert dataset.num_classes == classes
    population = load(name, options(name, roots(name)), "iid" if clients == 20 else None)
    assert (len(population.clients), population.num_classes) == (clients, classes)
    assert len(population.mean) == len(population.std) == 3
    held = sum(len(part) for client in population.clients for part in (client.train, client.val, client.test))
    unheld = sum(len(test.examples) for test in population.tests if test.split == "ood")
    assert held + unheld == size


@pytest.mark.parametrize("name", sorted(set(WRITERS)))
def test_the_second_start_looks_at_no_image(roots, name, monkeypatch):
    first = made(name, roots(name))
    monkeypatch.setattr(Image, "open", None)
    monkeypatch.setattr("rayfed.data.sets.cifar.read_pickle", None)
    monkeypatch.setattr("scipy.io.loadmat", None)
    monkeypatch.setattr("rayfed.data.sets.mnist.read_idx", None)
    second = made(name, roots(name))
    np.testing.assert_array_equal(np.asarray(first.images), np.asarray(second.images))
    np.testing.assert_array_equal(first.labels, second.labels)


def test_a_changed_file_is_decoded_again(tmp_path):
    for title in "ab":
        picture(tmp_path / "own" / title / "0.png", 8)
    before = np.asarray(made("imagefolder", tmp_path, size=8, test=0.0).images)
    pixels = picture(tmp_path / "own/a/0.png", 8)
    os.utime(tmp_path / "own/a/0.png", ns=(1, 1))
    after = np.asarray(made("imagefolder", tmp_path, size=8, test=0.0).images)
    np.testing.assert_array_equal(after[0], pixels.transpose(2, 0, 1))
    np.testing.assert_array_equal(after[1], before[1])


def test_classes_and_domains_follow_the_folders(tmp_path):
    root = tmp_path
    colours = {}
    for domain, side in (("day", 10), ("night", 12)):
        for title in ("cat", "dog"):
            colours[domain, title] = picture(root / "own" / domain / title / "x.png", 8).transpose(2, 0, 1)
            (root / "own" / domain / title / "Thumbs.db").write_text(f"no image {side}")
    dataset = made("imagefolder", root, size=8, domains=["night", "day"], test=0.0)
    assert dataset.domains == ("night", "day")
    for row in range(4):
        key = dataset.domains[dataset.domain[row]], ("cat", "dog")[dataset.labels[row]]
        np.testing.assert_array_equal(np.asarray(dataset.images[row]), colours[key])


def test_another_folder_of_the_same_names_sizes_and_times_is_decoded_by_itself(tmp_path):
    """Such as a copy of a data set with noise added to the pixels, written by one program in one second."""
    found = []
    for folder, value in (("clean", 10), ("noisy", 200)):
        for label in ("cat", "dog"):
            path = tmp_path / folder / label / "0.bmp"
            path.parent.mkdir(parents=True)
            Image.new("RGB", (8, 8), (value, 0, 0)).save(path)
            os.utime(path, ns=(10**18, 10**18))
        dataset = resolve("imagefolder", DATASETS, where="data")(folder=str(tmp_path / folder), size=8, test=0.0).load()
        found.append(np.unique(dataset.images[:, 0]).tolist())
    assert found == [[10], [200]]


@pytest.mark.parametrize("names", [("train", "test"), ("Train", "val", "test")])
def test_torchvisions_layout_has_its_own_split(tmp_path, names):
    """The images of `test` are the test images; where there are both, those of `val` are for validation."""
    image_sets.tree(tmp_path / "own", names, ("cat", "dog"))
    dataset = made("imagefolder", tmp_path, size=8)
    assert (dataset.domains, dataset.num_classes) == (("images",), 2)
    files = {name: sorted((tmp_path / "own" / name).rglob("*.*")) for name in names}
    found = {np.asarray(dataset.images[row]).tobytes() for row in np.flatnonzero(dataset.is_test)}
    assert found == {decoding.resize_image(decoding.open_image(file), 8).tobytes() for file in files["test"]}
    assert len(dataset.labels) == sum(map(len, files.values()))
    (client,) = load("imagefolder", {"folder": str(tmp_path / "own"), "size": 8}).clients
    assert len(client.test) == dataset.is_test.sum()
    asked = load("imagefolder", {"folder": str(tmp_path / "own"), "domains": list(names), "size": 8})
    assert [client.domain for client in asked.clients] == list(names)


def test_splits_may_have_domains(tmp_path):
    for split in ("train", "test"):
        image_sets.tree(tmp_path / "own" / split, ("day", "night"), ("cat", "dog"), each=2)
    dataset = made("imagefolder", tmp_path, size=8)
    assert (dataset.domains, dataset.num_classes) == (("day", "night"), 2)
    assert dataset.domain[dataset.is_test].tolist() == dataset.domain[~dataset.is_test].tolist() == [0] * 4 + [1] * 4
    (tmp_path / "own/train/day").rename(tmp_path / "own/train/dawn")
    with pytest.raises(UsageError, match=r"own/train: no folder day, which test has; write names alike"):
        made("imagefolder", tmp_path, size=8)


@pytest.mark.parametrize("names", [("val", "test"), ("train", "test", "day"), ("day", "validation")])
def test_folders_named_as_splits_are_not_taken_for_domains(tmp_path, names):
    image_sets.tree(tmp_path / "own", names, ("cat", "dog"))
    with pytest.raises(UsageError, match=r"is named like a split; .*name them with data\.domains=\["):
        load("imagefolder", {"folder": str(tmp_path / "own")})
    asked = load("imagefolder", {"folder": str(tmp_path / "own"), "domains": list(names)})
    assert [client.domain for client in asked.clients] == list(names)
    image_sets.tree(tmp_path / "inside" / "day", names, ("cat", "dog"), each=1)  # these are no classes
    with pytest.raises(UsageError, match=r"is named like a split; expected"):
        load("imagefolder", {"folder": str(tmp_path / "inside")})


SIZES = {"a": 157, "b": 1123, "c": 40}


class TestSampling:
    def sizes(self, left_out=(), **given):
        kept = DomainSampling(**given).without(left_out).sample(SIZES)
        return {name: (int((~part.is_test).sum()), int(part.is_test.sum())) for name, part in kept.items()}

    def test_a_fifth_is_for_testing_rounded_up(self):
        """The sizes of DSLR and Caltech in ADCOL's Table 3."""
        assert self.sizes() == {"a": (125, 32), "b": (898, 225), "c": (32, 8)}

    def test_smallest_and_a_number_cut_training_sets_only(self):
        assert self.sizes(per_party="smallest") == {"a": (32, 32), "b": (32, 225), "c": (32, 8)}
        assert self.sizes(per_party=100) == {"a": (100, 32), "b": (100, 225), "c": (32, 8)}

    def test_a_share_is_of_the_training_set(self):
        """FRAug: OfficeHome's Art has 2,427 images; a tenth is for testing, a tenth of the rest is kept: 218."""
        kept = DomainSampling(test=0.1, share=0.1).sample({"art": 2427})["art"]
        assert (int((~kept.is_test).sum()), int(kept.is_test.sum())) == (218, 243)


def test_the_domain_left_out_is_whole_and_not_the_smallest(roots):
    """A fifth of 35 images is for testing: 28 train, and a half of them is kept where somebody holds them."""
    population = load("pacs", {"root": str(roots("pacs")), "per_party": "smallest"}, leave_out=["sketch", "photo"])
    assert [client.domain for client in population.clients] == ["art_painting", "cartoon"]
    tests = [(test.domain, test.split, len(test.examples)) for test in population.tests]
    assert tests == [("sketch", "ood", 35), ("photo", "ood", 35)]
    given = {"root": str(roots("pacs")), "size": 8, "share": 0.5}
    population = load("pacs", given, None, {"validation": 0.0}, "sketch")
    assert [(client.domain, len(client.train)) for client in population.clients] == [
        ("photo", 14), ("art_painting", 14), ("cartoon", 14),
    ]  # fmt: skip
    assert [(test.domain, len(test.examples)) for test in population.tests] == [("sketch", 35)]
    with pytest.raises(UsageError, match=r"^leave_out=sketch: no such domain in pacs; known: cartoon, photo$"):
        load("pacs", {**given, "domains": ["photo", "cartoon"]}, leave_out="sketch")


def test_cifar_pickles_give_pixels_in_order(tmp_path):
    batch = image_sets.cifar_batch(7, "fine_labels", 100)
    image_sets.pickled(tmp_path / "cifar-100-python/train", batch)
    image_sets.pickled(tmp_path / "cifar-100-python/test", image_sets.cifar_batch(2, "fine_labels", 100))
    dataset = made("cifar100", tmp_path)
    red_second_row = batch["data"][4, 32:64]
    np.testing.assert_array_equal(np.asarray(dataset.images[4])[0, 1], red_second_row)
    assert dataset.labels.tolist() == [*range(7), 0, 1]
    assert dataset.index.tolist() == [*range(7), 0, 1]
    assert dataset.is_test.tolist() == [False] * 7 + [True] * 2


def test_a_pickle_of_python_2_is_read(tmp_path):
    """As CIFAR's own: protocol 2, byte strings for keys, numpy's old module names, bytes for pixels."""
    old = (
        b"\x80\x02}q\x01(U\x06labelsq\x02]q\x03(K\x00K\x09eU\x04dataq\x04cnumpy.core.multiarray\n_reconstruct\nq\x05"
        b"cnumpy\nndarray\nq\x06K\x00\x85U\x01b\x87Rq\x07(K\x01K\x02M\x00\x0c\x86cnumpy\ndtype\nq\x08U\x02u1K\x00K\x01"
        b"\x87Rq\x09(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T\x00\x18\x00\x00"
        + bytes(3072) + bytes([200]) * 3072 + b"tbu."
    )  # fmt: skip
    for file in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        (tmp_path / "cifar-10-batches-py").mkdir(exist_ok=True)
        (tmp_path / "cifar-10-batches-py" / file).write_bytes(old)
    dataset = made("cifar10", tmp_path)
    assert dataset.labels.tolist() == [0, 9] * 6
    assert np.asarray(dataset.images)[:, 0, 0, 0].tolist() == [0, 200] * 6


class TestWilds:
    def test_hospitals_are_clients_and_two_are_unseen(self, roots):
        population = load("camelyon17", {"root": str(roots("camelyon17")), "size": 16}, "natural")
        assert [test.domain for test in population.tests] == ["hospital-1", "hospital-2"]
        assert [len(client.test) for client in population.clients] == [2, 2, 2]
        dataset = made("camelyon17", roots("camelyon17"))
        assert set(dataset.client[dataset.domain == 3]) == {3}

    @pytest.mark.parametrize(
        ("name", "old", "new", "said"),
        [
            ("camelyon17", ",4,4,", ",4,7,", "6 of 30 rows were left out: center is none of 0, 1, 2, 3, 4"),
            ("rxrx1", ",RPE,", ",HeLa,", "16 of 88 rows were left out: cell_type is none of HEPG2, HUVEC, RPE, U2OS"),
        ],
    )
    def test_rows_of_unknown_places_are_counted(self, tmp_path, capsys, name, old, new, said):
        getattr(image_sets, name)(tmp_path)
        (path,) = tmp_path.glob("*/metadata.csv")
        path.write_text(path.read_text().replace(old, new))
        dataset = made(name, tmp_path, size=8)
        assert len(dataset) == {"camelyon17": 24, "rxrx1": 72}[name]
        assert f"rayfed: {path}: {said}\n" in capsys.readouterr().err

    def test_rxrx1_trains_on_site_1_of_the_training_experiments(self, roots):
        dataset = made("rxrx1", roots("rxrx1"), size=8)
        assert dataset.domains == ("HEPG2", "HUVEC", "RPE", "U2OS", "val", "test")
        assert dataset.ood == ("val", "test")
        held = dataset.rows()
        assert int((~dataset.is_test[held]).sum()) == int(dataset.is_test[held].sum()) == 2 * (3 + 6 + 3 + 2)
        assert len(set(dataset.client[held])) == 14
        population = load("rxrx1", {"root": str(roots("rxrx1")), "size": 8}, "natural", {"validation": 0.0})
        assert len(population.clients) == 14

    def test_camelyon17s_published_split_leaves_out_its_own_two_hospitals(self, roots):
        given = {"root": str(roots("camelyon17")), "size": 8}
        with pytest.raises(UsageError, match=r"^data.split=published: hospital-[12] has no split; leave it out, or"):
            load("camelyon17", given, leave_out="hospital-0")
        population = load("camelyon17", {**given, "split": "random"}, leave_out="hospital-0")
        assert [test.domain for test in population.tests] == ["hospital-0"]
        assert len(population.clients) == 4

    def test_fraugs_clients_are_quarters_of_the_experiments_of_a_cell_type(self, roots):
        """5, 9, 4 and 4 experiments: quarters of 1, 2, 1 and 1 experiments, of 4 images each."""
        dataset = made("rxrx1", roots("rxrx1"), size=8, split="random", groups_per_type=3)
        numbers, counts = np.unique(dataset.client, return_counts=True)
        assert numbers.tolist() == [0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14]
        assert counts.tolist() == [4] * 3 + [8] * 3 + [4] * 6
        few = made("rxrx1", roots("rxrx1"), size=8, split="random", classes=50)
        assert (set(few.labels), few.num_classes) == ({3}, 50)


class TestRotatedCifar10:
    def view(self, roots, **given):
        return made("rotated_cifar10", roots("rotated_cifar10"), **given)

    def test_tests_are_turned_by_each_angle(self, roots):
        dataset = self.view(roots)
        assert [test.domain for test in dataset.tests] == [f"{angle}deg" for angle in range(0, 150, 15)]
        plain, quarter = (np.asarray(dataset.tests[number].examples.x) for number in (0, 6))
        np.testing.assert_array_equal(quarter, np.rot90(plain, axes=(2, 3)))

    def test_angles_follow_the_clients_mix(self, roots):
        personal = self.view(roots, angles=[0, 180]).client_view
        images = np.random.default_rng(0).integers(0, 256, (4000, 3, 4, 4), dtype=np.uint8)
        for client in range(3):
            turned = (personal.images(client, images) != images).any(axis=(1, 2, 3)).mean()
            assert turned == pytest.approx(personal.mix(client)[1], abs=0.03)
        assert not np.allclose(personal.mix(0), personal.mix(1))


RED, SQUARE = (220, 30, 10), np.pad(np.full((4, 4), 255, np.uint8), 2)


def with_alpha(colour, mode="RGBA"):
    """A square of a colour on nothing."""
    image = Image.new("RGBA", (8, 8), (*colour, 255))
    image.putalpha(Image.fromarray(SQUARE))
    return image.convert(mode)


def on_white(colour):
    return np.where(SQUARE[..., None] == 255, np.array(colour), 255).astype(np.uint8)


def palette():
    image = Image.fromarray((SQUARE // 255).astype(np.uint8), "P")
    image.putpalette([0, 0, 0, *RED])
    image.info["transparency"] = 0
    return image


def png_of_16_bits(path, values, key=None):
    """Write a PNG of 16 bits per channel, [H, W] or [H, W, 3]; `key` stands for nothing. Not every Pillow can."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    head = struct.pack(">IIBBBBB", *values.shape[:2], 16, 2 if values.ndim == 3 else 0, 0, 0, 0)
    nothing = b"" if key is None else chunk(b"tRNS", struct.pack(">H", key))
    pixels = chunk(b"IDAT", zlib.compress(rows))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + nothing + pixels + chunk(b"IEND", b""))


class TestUsersImages:
    """Images as users have them keep what they show, or one line says what is lost."""

    def folder(self, tmp_path, image, name="x.png", **options):
        target = tmp_path / "own" / "a" / name
        picture(tmp_path / "own" / "b" / "0.png", 8)
        target.parent.mkdir(parents=True, exist_ok=True)
        image(target) if callable(image) else image.save(target, **options)
        return np.asarray(made("imagefolder", tmp_path, size=8, test=0.0).images)[0].transpose(1, 2, 0)

    @pytest.mark.parametrize(
        ("image", "name", "expected"),
        [
            (with_alpha((0, 0, 0)), "x.png", on_white((0, 0, 0))),
            (with_alpha(RED), "x.webp", on_white(RED)),
            (with_alpha((90, 90, 90), "LA"), "x.png", on_white((90, 90, 90))),
            (lambda path: png_of_16_bits(path, np.where(SQUARE, 90, 7), 7), "x.png", on_white((90, 90, 90))),
            (palette(), "x.gif", on_white(RED)),
            (palette(), "x.png", on_white(RED)),
        ],
    )
    def test_what_is_transparent_is_white(self, tmp_path, capsys, image, name, expected):
        options = {"lossless": True} if name == "x.webp" else {}
        np.testing.assert_array_equal(self.folder(tmp_path, image, name, **options), expected)
        again = made("imagefolder", tmp_path, size=8, test=0.0)  # from the cache, in another process
        np.testing.assert_array_equal(np.asarray(again.images)[0].transpose(1, 2, 0), expected)
        line = "rayfed: some images have transparent pixels, which are shown on white\n"
        assert capsys.readouterr().err == line
        print_once.cache_clear()
        made("imagefolder", tmp_path, size=8, test=0.0)
        assert capsys.readouterr().err == line

    @pytest.mark.parametrize("ending", ["jpg", "png", "webp", "tif", "MPO"])
    def test_cameras_say_how_an_image_is_turned(self, tmp_path, ending):
        pixels = np.zeros((8, 8, 3), np.uint8)
        pixels[:, :4] = 200  # the left half is light
        for orientation, side in ((1, np.s_[:, :4]), (3, np.s_[:, 4:]), (6, np.s_[:4]), (8, np.s_[4:])):
            exif = Image.Exif()
            exif[0x0112] = orientation
            shown = self.folder(tmp_path, Image.fromarray(pixels), f"x.{ending}", exif=exif)
            light = np.zeros((8, 8), bool)
            light[side] = True
            np.testing.assert_array_equal(shown.mean(axis=2) > 100, light)

    @pytest.mark.parametrize(
        ("image", "name", "expected"),
        [
            (Image.fromarray(SQUARE).convert("1"), "x.png", np.repeat(SQUARE[..., None], 3, 2)),
            (Image.fromarray(SQUARE // 2), "x.PGM", np.repeat(SQUARE[..., None] // 2, 3, 2)),
            (Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "x.tif", np.full((8, 8, 3), (255, 0, 0))),
            (Image.fromarray(SQUARE.astype(np.uint16) // 3), "x.png", np.repeat(SQUARE[..., None] // 3, 3, 2)),
            (Image.new("RGB", (8, 8), RED), "x.bmp", np.full((8, 8, 3), RED)),
        ],
    )
    def test_every_mode_has_its_values(self, tmp_path, capsys, image, name, expected):
        np.testing.assert_array_equal(self.folder(tmp_path, image, name), expected)
        assert capsys.readouterr().err == ""

    def test_16_bits_and_several_frames(self, tmp_path, capsys):
        values = np.arange(8 * 8 * 3).reshape(8, 8, 3)
        shown = self.folder(tmp_path, lambda path: png_of_16_bits(path, values * 256 + 77))
        np.testing.assert_array_equal(shown, values)
        frames = [Image.new("L", (8, 8), value) for value in (10, 200)]
        shown = self.folder(tmp_path, frames[0], "f.gif", save_all=True, append_images=frames[1:])
        assert (shown == 10).all()
        assert "some images have several frames, of which the first is read" in capsys.readouterr().err

    def test_folders_below_a_class_are_read_and_other_files_counted(self, tmp_path, capsys):
        root = tmp_path / "own"
        names = ("0.PNG", "ward/1.jpeg", "ward/2.Jfif", "ward/old/3.gif", "4.ppm", "5.webp")
        for number, name in enumerate(names):
            path = root / "a" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", (8, 8), 40 * number).save(path)
        picture(root / "b" / "0.png", 8)
        told = "notes.txt ward/more.TXT ward/scan .hidden.png report.pdf .ipynb_checkpoints/x.png"
        for name in f"{told} .DS_Store Thumbs.db ._0.png desktop.ini __MACOSX/0.png".split():
            (root / "b" / name).parent.mkdir(exist_ok=True)
            (root / "b" / name).write_bytes(b"")
        (root / "__MACOSX").mkdir()
        (root / "a" / "ward" / "again").symlink_to(root / "a")
        dataset = made("imagefolder", tmp_path, size=8, test=0.0, domains=["images"])
        assert dataset.labels.tolist() == [0] * 6 + [1]
        assert sorted(dataset.images[:6, 0, 4, 4].round(-1).tolist()) == [0, 40, 80, 120, 160, 200]
        said = "6 files were left out: 2 .txt, 1 .ipynb_checkpoints/, 1 hidden, 1 .pdf, 1 without an ending"
        *_, line = capsys.readouterr().err.splitlines()
        assert line.startswith(f"rayfed: {root}: 6 files were left out: 2 .txt, ")
        assert set(line.rpartition(": ")[2].split(", ")) == set(said.rpartition(": ")[2].split(", "))

    def test_patients_below_classes(self, tmp_path):
        own = tmp_path / "own"
        image_sets.tree(own, ("benign", "malignant"), ("p0", "p1"), each=2)
        assert made("imagefolder", tmp_path, size=8).domains == ("benign", "malignant")
        dataset = made("imagefolder", tmp_path, size=8, domains=["images"], test=0.0)
        assert (dataset.domains, dataset.labels.tolist()) == (("images",), [0] * 4 + [1] * 4)
        picture(own / "loose.png")
        with pytest.raises(UsageError, match=r"own/loose.png: an image without a label"):
            made("imagefolder", tmp_path, size=8)


def test_a_class_of_equal_images_and_untested_clients_are_named(tmp_path, capsys):
    image_sets.tree(tmp_path, ("own",), ("a", "b"))
    for path in (tmp_path / "own/b").iterdir():
        Image.new("L", (8, 8)).save(path)
    load("imagefolder", {"folder": str(tmp_path / "own"), "size": 8})
    assert re.fullmatch(r"rayfed: imagefolder: all \d images of class 1 of images are equal\n", capsys.readouterr().err)
    rows = np.arange(9)
    np.savez(tmp_path / "x.npz", images=rows[:, None] / 9, labels=rows % 2, client=rows % 3, is_test=rows == 4)
    load("npz", {"file": str(tmp_path / "x.npz")})
    assert capsys.readouterr().err == "rayfed: x: 2 of 3 clients have no test examples: 0, 2\n"
