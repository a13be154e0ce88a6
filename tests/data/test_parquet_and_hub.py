"""Labelled tables: Parquet files, and folders of the Hugging Face hub written as the package `datasets` writes them."""

import io
import json
from decimal import Decimal

import numpy as np
import pandas
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from rayfed.core.errors import UsageError
from rayfed.data.loading import load
from rayfed.data.sets.labelled_table import HuggingFace, Table


def png(value, mode="RGB", size=(4, 6)):
    buffer = io.BytesIO()
    Image.new(mode, size, value if mode == "L" else (value, 0, 255 - value)).save(buffer, "PNG")
    return buffer.getvalue()


def write(folder, name="mine.parquet", **columns):
    folder.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.table(columns), folder / name)
    return str(folder / name)


class TestFeatures:
    def test_several_columns_of_numbers(self, tmp_path):
        file = write(tmp_path, age=[1, 2, 3], weight=[0.5, 1.5, 2.5], smokes=[True, False, True], label=[0, 1, 1])
        dataset = Table(file=file, features=["weight", "age", "smokes"]).load()
        assert dataset.images.dtype == np.float32
        assert dataset.images.tolist() == [[0.5, 1, 1], [1.5, 2, 0], [2.5, 3, 1]]
        assert (dataset.name, dataset.num_classes, dataset.labels.tolist()) == ("mine", 2, [0, 1, 1])

    def test_hidden_files_are_not_read(self, tmp_path, capsys):
        folder = tmp_path / "visits"
        folder.mkdir()
        write(folder, a=[0.0, 1.0], b=[2.0, 3.0], label=[0, 1])
        (folder / "._visits.parquet").write_bytes(b"of a Mac")
        write(folder / ".ipynb_checkpoints", "mine-checkpoint.parquet", a=[0.0, 1.0], b=[2.0, 3.0], label=[0, 1])
        (folder / "notes.txt").write_text("not a table")
        for dataset in (
            Table(file=str(folder), features=["a", "b"]).load(),
            HuggingFace(folder=str(folder), features=["a", "b"]).load(),
        ):
            assert dataset.images.tolist() == [[0, 2], [1, 3]]
        assert capsys.readouterr().err == f"rayfed: {folder}: 1 file was left out: 1 .txt\n"

    def test_lists(self, tmp_path):
        tokens = write(tmp_path, "tokens.parquet", x=[[1, 2, 3], [4, 5, 6]], label=[0, 1])
        dataset = Table(file=tokens, features=["x"]).load()
        assert dataset.images.dtype == np.int64
        assert dataset.images.tolist() == [[1, 2, 3], [4, 5, 6]]
        pixels = pa.array([[[[1, 2], [3, 4]]] * 3] * 2, pa.list_(pa.list_(pa.list_(pa.uint8()))))
        images = Table(file=write(tmp_path, "p.parquet", x=pixels, label=[0, 1]), features=["x"]).load()
        assert images.images.dtype == np.uint8
        assert images.images.shape == (2, 3, 2, 2)
        fixed = pa.FixedSizeListArray.from_arrays(pa.array([0.5, 1.5, 2.5, 3.5]), 2)
        floats = Table(file=write(tmp_path, "f.parquet", x=fixed, label=[0, 1]), features=["x"]).load()
        assert floats.images.tolist() == [[0.5, 1.5], [2.5, 3.5]]
        assert floats.images.dtype == np.float32

    def test_images_as_bytes_and_as_the_hubs_structs(self, tmp_path):
        plain = Table(file=write(tmp_path, "a.parquet", image=[png(10), png(200)], label=[0, 1]), mean=[0.1, 0.2, 0.3])
        dataset = plain.load()
        assert dataset.images.shape == (2, 3, 6, 4)
        assert dataset.images[:, :, 5, 3].tolist() == [[10, 0, 245], [200, 0, 55]]
        assert (dataset.mean, dataset.std) == ((0.1, 0.2, 0.3), (0.5,) * 3)
        grey = [{"bytes": png(value, "L"), "path": "x.png"} for value in (7, 9)]
        dataset = Table(file=write(tmp_path, "b.parquet", img=grey, label=[0, 1])).load()
        assert dataset.images.shape == (2, 1, 6, 4)
        assert dataset.images[:, 0, 0, 0].tolist() == [7, 9]

    def test_images_of_several_sizes_are_brought_to_one(self, tmp_path):
        file = write(tmp_path, image=[png(10), png(200, size=(9, 9))], label=[0, 1])
        words = r"mine.parquet: row 1: column 'image': an image of 9 x 9, but the first is 4 x 6; set data.size"
        with pytest.raises(UsageError, match=words):
            Table(file=file).load()
        Table(file=file, size=4).load()
        file = write(tmp_path, image=[png(10, size=(4, 4)), png(200, size=(9, 9))], label=[0, 1])
        Table(file=file, size=4).load()  # in the cache now, in the form that the first image has
        with pytest.raises(UsageError, match=r"an image of 9 x 9, but the first is 4 x 4; set data.size"):
            Table(file=file).load()
        dataset = Table(file=file, size=5).load()
        assert dataset.images.shape == (2, 3, 5, 5)
        assert dataset.images[1, 0].tolist() == [[200] * 5] * 5

    def test_all_cells_decide_on_grey_and_every_cell_is_shown_as_it_is_meant(self, tmp_path, capsys):
        def cell(image, kind="PNG", **options):
            buffer = io.BytesIO()
            image.save(buffer, kind, **options)
            return buffer.getvalue()

        exif = Image.Exif()
        exif[0x0112] = 3
        half = Image.new("RGBA", (4, 6), (250, 0, 0, 255))
        half.paste((0, 0, 0, 0), (0, 0, 4, 3))
        turned = Image.new("L", (4, 6), 90)
        turned.paste(0, (0, 3, 4, 6))
        cells = [png(10, "L"), png(200), cell(half), cell(turned, exif=exif), cell(Image.new("1", (4, 6), 1))]
        dataset = Table(file=write(tmp_path, image=cells, label=[0, 1, 0, 1, 0])).load()
        assert dataset.images.shape == (5, 3, 6, 4)
        corners = [[(10, 10, 10)] * 2, [(200, 0, 55)] * 2, [(255, 255, 255), (250, 0, 0)], [(0, 0, 0), (90, 90, 90)]]
        corners.append([(255, 255, 255)] * 2)
        assert dataset.images[:, :, (0, 5), 0].transpose(0, 2, 1).tolist() == [list(map(list, two)) for two in corners]
        assert "some images have transparent pixels, which are shown" in capsys.readouterr().err
        grey = [png(10, "L"), cell(half.convert("LA")), cell(Image.fromarray(np.full((6, 4), 7, np.uint16)))]
        dataset = Table(file=write(tmp_path, "grey.parquet", image=grey, label=[0, 1, 0])).load()
        assert dataset.images.shape == (3, 1, 6, 4)
        assert dataset.images[:, 0, (0, 5), 0].tolist() == [[10, 10], [255, 75], [7, 7]]

    def test_more_rows_than_are_decoded_at_a_time_over_two_files(self, tmp_path):
        values = np.arange(2100) % 256
        cells = [png(int(value), "L", (1, 1)) for value in values]
        write(tmp_path / "folder", "0.parquet", image=cells[:1100], label=values[:1100] % 3)
        write(tmp_path / "folder", "1.parquet", image=cells[1100:], label=values[1100:] % 3)
        dataset = Table(file=str(tmp_path / "folder")).load()
        assert dataset.images[:].ravel().tolist() == values.tolist()
        assert dataset.labels.tolist() == (values % 3).tolist()
        assert dataset.index.tolist() == list(range(2100))


class TestRows:
    def test_clients_domains_and_sides(self, tmp_path):
        file = write(
            tmp_path, x=[[float(n)] for n in range(8)], label=list("abababab"), who=["z", "z", "y", "y"] * 2,
            scanner=["new", "old"] * 4, part=["train", "train", "val", "train", "test", "test", "test", "test"],
        )  # fmt: skip
        dataset = Table(file=file, features=["x"], client="who", domain="scanner", split="part").load()
        assert dataset.labels.tolist() == [0, 1] * 4
        assert dataset.client.tolist() == [1, 1, 0, 0] * 2
        assert (dataset.domain.tolist(), dataset.domains) == ([0, 1] * 4, ("new", "old"))
        assert dataset.is_test.tolist() == [False] * 4 + [True] * 4
        options = {"file": file, "features": ["x"]}
        natural = load("parquet", options | {"client": "who", "split": "part"}, None, {"validation": 0.0})
        assert [(client.domain, client.test.x.ravel().tolist()) for client in natural.clients] == [
            ("y", [6, 7]), ("z", [4, 5]),
        ]  # fmt: skip
        scanners = load("parquet", options | {"domain": "scanner"}, None, {"validation": 0.0})
        assert [(client.domain, len(client.train), len(client.test)) for client in scanners.clients] == [
            ("new", 3, 1), ("old", 3, 1),
        ]  # fmt: skip

    @pytest.mark.parametrize(
        ("columns", "options", "words"),
        [
            ({"label": [0, -1]}, {}, r"mine.parquet: row 1: column 'label': label -1; .*, which 1 of 2 labels are not"),
            ({"label": [1, 2]}, {}, r"mine.parquet: column 'label': the labels are 1 to 2; .*data.num_classes=3"),
            ({"label": [0, None]}, {}, r"mine.parquet: row 1: column 'label' is empty"),
            ({"target": [0, 1]}, {}, r"mine.parquet: no column 'label'; it has x, target"),
            ({"label": [0, 1]}, {"client": "who"}, r"no column 'who'"),
            ({"label": [0, 1]}, {"split": "label"}, r"column 'label' has '0'; expected train, val or test"),
            ({"x": [1.0, 2.0], "label": [0, 1]}, {"features": ["x", "label"]}, r"^data\.features: label is data"),
            ({"label": [0, 1]}, {"features": None}, r"no column image or img; set data.features .*x, label"),
            ({"label": [0, 1], "x": [[1.0], [1.0, 2.0]]}, {}, r"column 'x' has lists of \[1, 2\] values"),
            ({"label": [0, 1], "x": [[1.0], [float("nan")]]}, {}, r"row 1: x: has values that are not finite, as in 1"),
            ({"label": [0, 1], "x": ["1", "b"]}, {}, r"row 1: column 'x' has 'b', no number, as 1 of 2 rows"),
            ({"label": [0, 1], "x": pa.array([0, 1], pa.date32())}, {}, r"column 'x' is date32.*expected numbers"),
            ({"label": [0, 1], "who": ["a", "a "]}, {"client": "who"}, r"column 'who' has 'a' and 'a ', which differ"),
            ({"label": [0, 1], "x": [png(3), png(3)[:50]]}, {}, r"row 1: column 'x': .*not an image"),
            ({"label": [0, 1], "x": [png(3), None]}, {}, r"row 1: column 'x': .*not an image"),
        ],
    )  # fmt: skip
    def test_a_wrong_column_is_one_line(self, tmp_path, columns, options, words):
        file = write(tmp_path, **({"x": [[1.0], [2.0]]} | columns))
        with pytest.raises(UsageError, match=words):
            Table(**({"file": file, "features": ["x"]} | options)).load()

    def test_files_that_are_not_there_or_do_not_fit(self, tmp_path):
        with pytest.raises(UsageError, match=r"none.parquet: no such file"):
            Table(file=str(tmp_path / "none.parquet")).load()
        write(tmp_path, "a.parquet", x=[[1.0]], label=[0])
        write(tmp_path, "b.parquet", x=["1"], label=[0])
        with pytest.raises(
            UsageError, match=r"b.parquet: column 'x' is string, but list<.*double> in a.parquet; write it"
        ):
            Table(file=str(tmp_path), features=["x"]).load()


def saved(folder, split, cells, labels, names=("cat", "dog", "owl")):
    """One split as datasets' save_to_disk writes it: Arrow streams, state.json and dataset_info.json."""
    folder.mkdir(parents=True)
    features = {"image": {"_type": "Image"}, "label": {"names": list(names), "_type": "ClassLabel"}}
    table = pa.table(
        {"image": [{"bytes": cell, "path": None} for cell in cells], "label": pa.array(labels, pa.int64())}
    )
    table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    half = len(cells) // 2
    files = []
    for number, piece in enumerate((table.slice(0, half), table.slice(half))):
        files.append({"filename": f"data-{number:05d}-of-00002.arrow"})
        with (
            pa.OSFile(str(folder / files[-1]["filename"]), "wb") as sink,
            pa.ipc.new_stream(sink, table.schema) as writer,
        ):
            writer.write_table(piece)
    state = {"_data_files": files, "_fingerprint": "0", "_format_type": None, "_split": split}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps({"features": features}))


def dataset_dict(folder):
    saved(folder / "test", "test", [png(50), png(60)], [1, 0])
    saved(folder / "train", "train", [png(10), png(20), png(30), png(40)], [0, 1, 1, 0])
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": ["test", "train"]}))
    return str(folder)


class TestHub:
    def test_what_save_to_disk_writes(self, tmp_path):
        dataset = HuggingFace(folder=dataset_dict(tmp_path / "pets")).load()
        assert dataset.name == "pets"
        assert dataset.images[:, 0, 0, 0].tolist() == [10, 20, 30, 40, 50, 60]
        assert dataset.labels.tolist() == [0, 1, 1, 0, 1, 0]
        assert dataset.num_classes == 3  # the description names three, though two are there
        assert dataset.is_test.tolist() == [False] * 4 + [True] * 2
        assert (dataset.sources, dataset.index.tolist()) == (("train", "test"), [0, 1, 2, 3, 0, 1])
        only = HuggingFace(folder=str(tmp_path / "pets"), splits=["train"]).load()
        assert (len(only), only.is_test.any()) == (4, False)
        assert len(HuggingFace(folder=str(tmp_path / "pets" / "train")).load()) == 4

    def test_the_cache_of_datasets_and_clients(self, tmp_path):
        folder = tmp_path / "letters" / "default" / "0.0.0" / "abc"
        folder.mkdir(parents=True)
        table = pa.table({"x": [[float(n)] for n in range(8)], "label": [0, 1] * 4, "writer_id": ["b", "a"] * 4})
        for name in ("letters-train.arrow", "cache-123.arrow"):
            with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)
        options = {"folder": str(tmp_path / "letters"), "features": ["x"], "client": "writer_id"}
        population = load("huggingface", options, None, {"validation": 0.0})
        assert [(len(client.train), len(client.test)) for client in population.clients] == [(3, 1)] * 2
        assert {value % 2 for value in population.clients[0].train.x.ravel()} == {1}

    @pytest.mark.parametrize(
        ("file", "content", "words"),
        [
            ("data-00001-of-00002.arrow", None, r"data-00001-of-00002.arrow: missing"),
            ("data-00000-of-00002.arrow", b"\xff" * 99, r"data-00000.* truncated, damaged or not an Arrow stream"),
            ("state.json", b"{", r"state.json: .* truncated, damaged or not a JSON object"),
            ("state.json", b'{"_indices_data_files": [1]}', r"train: saved with a separate selection.*flatten_indices"),
            ("state.json", b"{}", r"state.json: .* not a list of data files"),
        ],
    )  # fmt: skip
    def test_a_damaged_folder_is_one_line(self, tmp_path, file, content, words):
        folder = dataset_dict(tmp_path / "pets")
        path = tmp_path / "pets" / "train" / file
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(UsageError, match=words):
            HuggingFace(folder=folder).load()

    def test_other_folders(self, tmp_path):
        with pytest.raises(UsageError, match=r"none: no such folder; expected a folder written by datasets"):
            HuggingFace(folder=str(tmp_path / "none")).load()
        with pytest.raises(UsageError, match=r"no .parquet or .arrow files"):
            HuggingFace(folder=str(tmp_path)).load()
        with pytest.raises(UsageError, match=r"data.splits=\['dev'\]: .*pets has test, train"):
            HuggingFace(folder=dataset_dict(tmp_path / "pets"), splits=["dev"]).load()
        for config in ("plain", "fine"):
            write(tmp_path / "two" / config, "train-0.parquet", x=[[1.0]], label=[0])
        with pytest.raises(UsageError, match=r"train files in 2 folders, including fine and plain"):
            HuggingFace(folder=str(tmp_path / "two"), features=["x"]).load()


def test_columns_of_pandas_types(tmp_path):
    sites = ["north", "south", "north", "east"]
    frame = pandas.DataFrame({
        "age": pandas.array([30, 40, 50, 60], "Int64"), "ill": pandas.Categorical(["yes", "no", "no", "yes"]),
        "site": pandas.Categorical(sites), "ward": pandas.Categorical([3, 5, 3, 5]), "gap": [1.0, 2.0, 2.0, 1.0],
        "dose": [Decimal("0.25"), Decimal("1.50"), Decimal("2.00"), Decimal("3.75")],
    })  # fmt: skip
    frame.to_parquet(tmp_path / "0.parquet")
    frame.assign(site=pandas.Categorical(sites, ["west", *sorted(set(sites))])).to_parquet(tmp_path / "1.parquet")
    options = {"file": str(tmp_path), "features": ["age", "dose"], "label": "ill"}
    dataset = Table(**options, client="ward", domain="site").load()
    assert dataset.images[:4].tolist() == [[30, 0.25], [40, 1.5], [50, 2], [60, 3.75]]
    assert dataset.labels.tolist() == [1, 0, 0, 1] * 2
    assert (dataset.domains, dataset.domain.tolist()) == (("east", "north", "south"), [1, 2, 1, 0] * 2)
    assert dataset.client.tolist() == [3, 5, 3, 5] * 2
    assert Table(**options, client="gap").load().client.tolist() == [1, 2, 2, 1] * 2
    frame.assign(age=pandas.array([30, None, 50, None], "Int64")).to_parquet(tmp_path / "1.parquet")
    with pytest.raises(UsageError, match=r"1.parquet: row 1: column 'age' is empty, as in 2 of 8 rows; fill these"):
        Table(**options).load()


FILE = "visits.csv:"


class TestCsv:
    ROWS = (
        "age,pressure,ill,hospital,split",
        *(f"{20 + i},{1.5 * i},{i % 2},{'ab'[i % 3 == 0]},train" for i in range(12)),
    )

    def csv(self, tmp_path, *rows, name="visits.csv"):
        path = tmp_path / name
        path.write_text("\n".join(rows or self.ROWS) + "\n")
        return str(path)

    def table(self, file, **options):
        return Table(file=file, **({"features": ["age", "pressure"], "label": "ill"} | options)).load()

    def test_the_same_rows_as_parquet(self, tmp_path):
        file = self.csv(tmp_path)
        pandas.read_csv(file).to_parquet(tmp_path / "visits.parquet")
        options = {"client": "hospital", "split": "split"}
        one, other = self.table(file, **options), self.table(str(tmp_path / "visits.parquet"), **options)
        for field in ("images", "labels", "client", "is_test", "index"):
            np.testing.assert_array_equal(getattr(one, field), getattr(other, field))
        assert one.images.dtype == np.float32
        population = load("csv", {"file": file, "features": ["age", "pressure"], "label": "ill", "client": "hospital"})
        assert [len(client.train) for client in population.clients] == [6, 3]

    def test_words_are_classes_and_folders_are_read_in_order(self, tmp_path):
        for name, word in (("one.csv", "cat"), ("two.csv", "ant")):
            self.csv(tmp_path, "x,y", f"1,{word}", f"2,{word}", name=name)
        assert self.table(str(tmp_path), features=["x"], label="y").labels.tolist() == [1, 1, 0, 0]

    @pytest.mark.parametrize(
        ("line", "text", "options", "words"),
        [
            (None, "", {"features": ["aeg"]}, f"{FILE} no column 'aeg'; it has age, pressure, ill, hospital, split"),
            (4, "old,1,0,a,train", {}, "visits.csv: line 5: column 'age' has 'old', no number"),
            (4, "33,,0,a,train", {}, "visits.csv: line 5: column 'pressure' is empty"),
            (4, "33,NA,0,a,train", {}, "visits.csv: line 5: column 'pressure' has 'NA', no number, as 1 of 12 rows"),
            (4, "33,1,yes,a,train", {}, "visits.csv: line 5: column 'ill' has 'yes', and numbers in other rows"),
            (4, "33,1,0,a", {"split": "split"}, "visits.csv: line 5: column 'split' is empty"),
            (4, "33,1,0,a,train,train", {}, "Expected 5 fields in line 5, saw 6"),
            (4, '33,1,0,a,"train', {}, "EOF inside string starting at row 4"),
            (4, "33,inf,0,a,train", {},
             f"{FILE} line 5: age, pressure: has values that are not finite, as in 1 of 12 rows"),
            (0, "", {}, "visits.csv"),
        ],
    )  # fmt: skip
    def test_what_is_wrong_is_one_line_with_its_place(self, tmp_path, line, text, options, words):
        rows = list(self.ROWS)
        if line is not None:
            rows[line] = text
        with pytest.raises(UsageError) as caught:
            self.table(self.csv(tmp_path, *rows), **options)
        assert words in str(caught.value)

    def test_clients_are_text_and_no_name_is_taken_for_a_missing_value(self, tmp_path, capsys):
        sites, stages = ["001", "1", "02", "NA", "None"], ["None", "Stage I"]
        rows = [f"{i},{stages[i % 2]},{sites[i % 5]},{i % 2 == 0}" for i in range(20)]
        file = self.csv(tmp_path, "a, stage , site,first", *rows)
        options = {"features": ["a", "first"], "label": "stage", "client": "site", "domain": "site"}
        dataset = self.table(file, **options)
        assert dataset.domains == ("001", "02", "1", "NA", "None")
        assert dataset.client.tolist() == [0, 2, 1, 3, 4] * 4
        assert dataset.labels.tolist() == [0, 1] * 10
        assert dataset.images[:3].tolist() == [[0, 1], [1, 0], [2, 1]]
        said = capsys.readouterr().err.splitlines()
        assert f"rayfed: {file}: column 'site': 'NA' in 4 of 20 rows is taken for a name" in said

    @pytest.mark.parametrize("mark", [",", ";", "\t", "|"])
    def test_separators(self, tmp_path, mark):
        rows = [f"{i}.5{mark}{i % 2}{mark}{'north' if i else 'south'}" for i in range(4)]
        dataset = self.table(self.csv(tmp_path, f"a{mark}y{mark}site", *rows), features=["a"], label="y", domain="site")
        assert dataset.images.tolist() == [[0.5], [1.5], [2.5], [3.5]]
        assert dataset.domains == ("north", "south")

    def test_a_file_that_was_changed_is_read_again(self, tmp_path):
        assert len(self.table(self.csv(tmp_path))) == 12
        assert len(self.table(self.csv(tmp_path, *self.ROWS[:-1]))) == 11
