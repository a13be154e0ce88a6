"""data.download=true: tiny files in the published formats, from a server on loopback."""

import gzip
import hashlib
import io
import os
import platform
import signal
import socket
import tarfile
import threading
import zipfile
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torchvision

from helpers import image_sets
from helpers.file_server import serving
from rayfed.cli.main import main
from rayfed.core.errors import UsageError
from rayfed.core.options import is_required
from rayfed.core.registry import resolve
from rayfed.data.loading import load, load_partitioned
from rayfed.data.published import Published, obtain, sources
from rayfed.data.sets import DATASETS

DATA_PAGE = Path(__file__).parents[2] / "docs" / "data.md"


@pytest.fixture(autouse=True)
def only_loopback(monkeypatch):
    """No test reaches another machine, whatever an address says."""
    connect = socket.socket.connect

    def checked(self, address):
        assert address[0] in ("127.0.0.1", "localhost"), address
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", checked)


@pytest.fixture
def server():
    with serving() as files:
        yield files


@pytest.fixture
def published(tmp_path):
    """A folder for what a server has."""
    folder = tmp_path / "published"
    folder.mkdir()
    return folder


def md5(content):
    return "md5:" + hashlib.md5(content).hexdigest()


def redirect(monkeypatch, server, name, **changes):
    """Let a source have its files on the server."""
    changes = {"base": f"{server.address}/", "megabytes": 1, **changes}
    monkeypatch.setitem(sources(), name, replace(sources()[name], **changes))


@pytest.fixture
def mnist(monkeypatch, server, published):
    """MNIST on the server, packed as the published files are; returns the options that read it."""
    image_sets.mnist(published)
    checks = {}
    for path in (published / "MNIST" / "raw").iterdir():
        packed = gzip.compress(path.read_bytes(), mtime=0)
        server.files[f"/{path.name}.gz"] = packed
        checks[f"raw/{path.name}.gz"] = md5(packed)
    redirect(monkeypatch, server, "mnist", files=checks)
    return {"root": str(published.parent / "data"), "download": True}


FIRST = "/train-images-idx3-ubyte.gz"


def listing(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def contents(folder):
    return {name: (folder / name).read_bytes() for name in listing(folder) if "." in name}


class TestPlainFiles:
    """As torchvision's datasets have them."""

    def test_what_is_downloaded_is_read_and_a_second_call_asks_for_nothing(self, mnist, server, published):
        for _ in range(2):
            population = load("mnist", mnist, "iid", {"clients": 2})
        assert sum(len(part) for client in population.clients for part in client.parts) == 60
        plain = load("mnist", {"root": str(published)}, "iid", {"clients": 2})
        np.testing.assert_array_equal(population.clients[0].train.x[:], plain.clients[0].train.x[:])
        assert set(server.requests.values()) == {1}
        assert len(server.requests) == 4
        files = sorted(f"MNIST/raw{path}" for path in server.files)
        assert listing(Path(mnist["root"])) == ["MNIST", "MNIST/raw", *files]

    def test_only_missing_files_are_downloaded(self, mnist, server, published):
        raw = Path(mnist["root"]) / "MNIST" / "raw"
        raw.mkdir(parents=True)
        (raw / FIRST[1:-3]).write_bytes((published / "MNIST/raw" / FIRST[1:-3]).read_bytes())
        load("mnist", mnist, "iid", {"clients": 2})
        assert len(server.requests) == 3
        assert FIRST not in server.requests

    def test_processes_that_need_a_source_at_once_download_it_once(self, mnist, server):
        folder = Path(mnist["root"]) / "MNIST"
        threads = [threading.Thread(target=obtain, args=(sources()["mnist"], folder)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert set(server.requests.values()) == {1}
        assert len(listing(folder)) == 5

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda server: server.files.pop(FIRST), "404"),
            (lambda server: server.cut.add(FIRST), r"has md5 \w{32}, but the published"),
            (lambda server: server.files.update({FIRST: b"a captive portal"}), r"has md5 \w{32}, but the published"),
            (lambda server: server.moved.update({FIRST: "/gone"}), "404"),
        ],
    )
    @pytest.mark.parametrize("has_others", [False, True])
    def test_a_broken_download_leaves_nothing_and_says_how_to_go_on(self, mnist, server, change, message, has_others):
        root = Path(mnist["root"])
        if has_others:
            (root / "other").mkdir(parents=True)
        change(server)
        before = listing(root)
        words = rf"mnist: {server.address}{FIRST}: .*{message}.*nothing was kept; give the"
        with pytest.raises(UsageError, match=words):
            load("mnist", mnist, "iid", {"clients": 2})
        assert listing(root) == before

    def test_an_interrupt_leaves_nothing_and_what_a_killed_process_left_is_removed(self, mnist, server, monkeypatch):
        root = Path(mnist["root"])
        with monkeypatch.context() as patch:
            patch.setattr("rayfed.data.published._check", lambda path, check: os.kill(os.getpid(), signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                load("mnist", mnist)
        assert listing(root) == []
        left = root / f".mnist.{platform.node()}.part"
        (left / "raw").mkdir(parents=True)
        (left / FIRST[1:]).write_bytes(b"half")
        load("mnist", mnist, "iid", {"clients": 2})
        assert len(listing(root)) == 6

    @pytest.mark.parametrize("answer", [b"", b"HTTP/1.0 200 OK\r\nContent-Length: 99\r\n\r\nhalf"])
    def test_a_server_that_falls_silent_is_one_line(self, mnist, server, monkeypatch, answer):
        monkeypatch.setattr("rayfed.data.published.TIMEOUT", 0.2)
        with socket.create_server(("127.0.0.1", 0)) as silent:
            held = []
            threading.Thread(target=lambda: held.append(silent.accept()[0]) or held[0].sendall(answer)).start()
            redirect(monkeypatch, server, "mnist", base=f"http://127.0.0.1:{silent.getsockname()[1]}/")
            with pytest.raises(UsageError, match=r"^data.download=true: mnist: http://.*timed out; nothing was kept"):
                load("mnist", mnist)
        held[0].close()
        assert socket.getdefaulttimeout() is None
        assert listing(Path(mnist["root"])) == []

    def test_digits5_downloads_each_domain(self, mnist, server, published, monkeypatch):
        for name, write in (("svhn", image_sets.svhn), ("usps", image_sets.usps)):
            write(published)
            server.add(published / name.upper())
            checks = {file: md5(server.files[f"/{file}"]) for file in sources()[name].files}
            redirect(monkeypatch, server, name, files=checks)
        (Path(mnist["root"]) / "USPS").mkdir(parents=True)  # begun by hand
        population = load("digits5", {**mnist, "domains": ["mnist", "svhn", "usps"]})
        sizes = {client.domain: sum(map(len, client.parts)) for client in population.clients}
        assert sizes == {"mnist": 60, "svhn": 75, "usps": 30}
        with pytest.raises(UsageError, match=r"synthdigits: a shared drive .*; put the files into .*SynthDigits"):
            load("digits5", {**mnist, "domains": ["synthdigits"]})


def tar(folder, names):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for name in names:
            archive.add(folder / name, name)
    return stream.getvalue()


def zipped(entries):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return stream.getvalue()


class TestArchives:
    def test_wilds_archive_has_no_folder_and_its_table_is_counted(self, monkeypatch, server, published, tmp_path):
        image_sets.camelyon17(published)
        folder = published / "camelyon17_v1.0"
        server.files["/contents/blob/"] = tar(folder, ["metadata.csv", "patches"])
        archives = {f"{server.address}/contents/blob/": ""}
        redirect(monkeypatch, server, "camelyon17", base="", archives=archives, verify={"metadata.csv": "lines:99"})
        options = {"root": str(tmp_path / "data"), "download": True, "size": 16}
        with pytest.raises(UsageError, match=r"metadata\.csv has lines 31, but the published file has 99"):
            load("camelyon17", options)
        assert listing(tmp_path / "data") == []
        redirect(monkeypatch, server, "camelyon17", base="", verify={"metadata.csv": "lines:31"})
        assert len(load("camelyon17", options).clients) == 3

    @pytest.mark.parametrize(("split", "first", "classes"), [("balanced", 0, 47), ("letters", 1, 26)])
    def test_emnist_stands_upright_and_letters_count_from_zero(
        self, monkeypatch, server, published, tmp_path, split, first, classes
    ):
        image_sets.emnist(published, split, first, classes)
        folder = published / "EMNIST"
        server.files["/gzip.zip"] = zipped(contents(folder))
        redirect(monkeypatch, server, "emnist", archives={"gzip.zip": md5(server.files["/gzip.zip"])})
        options = {"root": str(tmp_path / "data"), "download": True, "split": split}
        dataset, _ = load_partitioned("emnist", options, "iid", {"clients": 2})
        assert (dataset.num_classes, int(dataset.is_test.sum()), len(dataset)) == (classes, 50, 150)
        np.testing.assert_array_equal(dataset.labels[:classes], np.arange(classes))
        stored = gzip.decompress((folder / f"gzip/emnist-{split}-train-images-idx3-ubyte.gz").read_bytes())
        pixels = np.frombuffer(stored, np.uint8, 28 * 28, 16).reshape(28, 28)
        np.testing.assert_array_equal(dataset.images[0, 0], pixels.T)

    @pytest.mark.parametrize("name", ["../evil", "/tmp/rayfed-evil", "a/../../evil", "link"])
    @pytest.mark.parametrize("kind", ["tar", "zip"])
    def test_members_outside_of_the_folder_are_refused(self, monkeypatch, server, tmp_path, name, kind):
        stream = io.BytesIO()
        if kind == "tar":
            with tarfile.open(fileobj=stream, mode="w") as archive:
                member = tarfile.TarInfo(name)
                member.type, member.linkname = (tarfile.SYMTYPE, "/etc") if name == "link" else (tarfile.REGTYPE, "")
                archive.addfile(member, io.BytesIO())
        else:
            with zipfile.ZipFile(stream, "w") as archive:
                entry = zipfile.ZipInfo(name)
                entry.external_attr = (0o120777 if name == "link" else 0o100644) << 16
                archive.writestr(entry, "/etc")
        server.files["/c"] = stream.getvalue()
        redirect(monkeypatch, server, "cifar10", archives={"c": ""})
        with pytest.raises(UsageError, match=rf"cifar10: the archive is not to be trusted: it would write '{name}'"):
            load("cifar10", {"root": str(tmp_path / "data"), "download": True})
        assert listing(tmp_path) == ["data"]
        assert not Path("/tmp/rayfed-evil").exists()

    @pytest.mark.parametrize("content", [b"", b"no archive", gzip.compress(b"no tar", mtime=0)])
    def test_what_is_no_archive_is_one_line(self, monkeypatch, server, tmp_path, content):
        server.files["/c.tar.gz"] = content
        redirect(monkeypatch, server, "cifar10", archives={"c.tar.gz": ""})
        with pytest.raises(UsageError, match="cifar10: the archive cannot be unpacked"):
            load("cifar10", {"root": str(tmp_path / "data"), "download": True})


class TestHub:
    @pytest.fixture(autouse=True)
    def hub(self, monkeypatch, server):
        pytest.importorskip("huggingface_hub")
        monkeypatch.setenv("HF_ENDPOINT", server.address)
        self.server, self.monkeypatch = server, monkeypatch

    def serve(self, name, folder, rows):
        source = sources()[name]
        hub = {**source.hub, "revision": "0123456789abcdef0123456789abcdef01234567", "rows": rows}
        self.server.add_hub(hub["repo"], hub["revision"], folder)
        self.monkeypatch.setitem(sources(), name, replace(source, hub=hub))

    def test_images_get_folders_of_domains_and_classes(self, published, tmp_path):
        image_sets.pacs(published / "made")
        found = sorted((published / "made").rglob("*.png"))
        classes = ["dog", "elephant", "giraffe", "guitar", "horse", "house", "person"]
        columns = {
            "image": [{"bytes": path.read_bytes(), "path": path.name} for path in found],
            "domain": [path.parts[-3] for path in found],
            "label": [classes.index(path.parts[-2]) for path in found],
        }
        image_sets.hub_table(published / "hub/data/train-00000-of-00001.parquet", columns, {"label": classes})
        self.serve("pacs", published / "hub", rows=len(found))
        copy = load("pacs", {"root": str(tmp_path / "data"), "download": True, "size": 16})
        made = load("pacs", {"root": str(published / "made"), "size": 16})
        for ours, theirs in zip(copy.clients, made.clients, strict=True):
            np.testing.assert_array_equal(ours.train.x[:], theirs.train.x[:])
            np.testing.assert_array_equal(ours.train.y, theirs.train.y)
        assert sorted(path.name for path in (tmp_path / "data/PACS").iterdir()) == [
            "art_painting", "cartoon", "photo", "sketch",
        ]  # fmt: skip

    def test_femnist_has_writers_for_clients(self, published, tmp_path):
        image_sets.femnist(published)
        self.serve("femnist", published / "FEMNIST", rows=90)
        population = load("femnist", {"root": str(tmp_path / "data"), "download": True})
        assert (population.name, population.num_classes, population.shape) == ("femnist", 62, (1, 28, 28))
        parts = [[len(part) for part in client.parts] for client in population.clients]
        assert [sum(sizes) for sizes in parts] == [30, 30, 30]
        assert [sizes[-1] for sizes in parts] == [3, 3, 3]

    def test_rows_are_counted_and_a_missing_repository_is_one_line(self, published, tmp_path):
        image_sets.hub_table(published / "data/train-0.parquet", {"text": ["a"], "label": [0]}, {})
        self.serve("ag_news", published, rows=127600)
        with pytest.raises(UsageError, match=r"ag_news: .*fancyzhx/ag_news.*has 1 rows, but 127,600 were published"):
            load("ag_news", {"root": str(tmp_path / "data"), "download": True})
        image_sets.hub_table(published / "pacs/data/train-0.parquet", {"picture": ["a"], "label": [0]}, {})
        self.serve("pacs", published / "pacs", rows=1)
        with pytest.raises(UsageError, match=r"pacs: .*KeyError: 'domain'; nothing was kept"):
            load("pacs", {"root": str(tmp_path / "data"), "download": True})
        self.server.files.clear()
        with pytest.raises(UsageError, match=r"ag_news: .*fancyzhx/ag_news.*nothing was kept"):
            load("ag_news", {"root": str(tmp_path / "data"), "download": True})
        assert listing(tmp_path / "data") == []


class TestTable:
    def test_checksums_are_those_of_torchvision(self):
        sets = torchvision.datasets
        for name, known in (("mnist", sets.MNIST), ("fashion_mnist", sets.FashionMNIST)):
            assert sources()[name].files == {f"raw/{file}": f"md5:{value}" for file, value in known.resources}
            assert sources()[name].base in known.mirrors
        for name, known in (("svhn", sets.SVHN), ("usps", sets.USPS)):
            entries = {url: f"md5:{value}" for part, (url, _, value) in known.split_list.items() if part != "extra"}
            assert {sources()[name].base + file: check for file, check in sources()[name].files.items()} == entries
        for name, known in (("cifar10", sets.CIFAR10), ("cifar100", sets.CIFAR100)):
            ((end, check),) = sources()[name].archives.items()
            assert (sources()[name].base + end, check) == (known.url, f"md5:{known.tgz_md5}")
        assert sources()["emnist"].archives == {"gzip.zip": f"md5:{sets.EMNIST.md5}"}
        assert sets.EMNIST.url == sources()["emnist"].base + "gzip.zip"

    def test_every_source_has_a_way_and_every_dataset_with_files_has_a_source(self):
        for source in sources().values():
            assert bool(source.files or source.archives or source.hub) != bool(source.by_hand), source.name
            checks = [*source.files.values(), *source.archives.values(), *source.verify.values()]
            assert all(check or source.verify for check in checks), source.name
            assert set(source.datasets) <= set(DATASETS)

    @pytest.mark.parametrize("name", DATASETS)
    def test_a_dataset_is_embedded_or_published_or_reads_files_that_the_user_names(self, name):
        kind = resolve(name, DATASETS, where="data.name")
        has_source = any(name in source.datasets for source in sources().values())
        assert has_source == issubclass(kind, Published)
        names_files = any(field.name in ("file", "folder") and is_required(field) for field in fields(kind))
        assert [getattr(kind, "embedded", False), has_source, names_files].count(True) == 1

    def test_the_page_has_the_sources_and_licences_of_the_table(self):
        rows = [line for line in DATA_PAGE.read_text().splitlines() if line.startswith("| `")]
        for source in sources().values():
            size = "by hand" if source.by_hand else source.size if source.megabytes else ""
            assert any(f"({source.page})" in row and source.licence in row and size in row for row in rows), source.name


class TestCommand:
    def test_all_sources_are_listed(self, capsys, tmp_path):
        (tmp_path / "SVHN").mkdir()
        assert main(["data", "--root", str(tmp_path)]) == 0
        lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")}
        assert set(lines) == set(sources())
        assert "246 MB  here     non-commercial use" in lines["svhn"]
        assert "by hand" in lines["synthdigits"]
