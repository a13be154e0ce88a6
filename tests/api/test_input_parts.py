"""Inputs of several parts: a dict or a tuple of arrays, which the model takes by keyword or by position."""

import warnings
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rayfed
from helpers import reference
from rayfed.core.errors import UsageError
from rayfed.data.dataset import Dataset
from rayfed.data.inputs import packed
from rayfed.data.loading import load
from rayfed.data.population import Examples, TestSet
from rayfed.data.user_clients import user_population
from rayfed.experiments.config import Config
from rayfed.experiments.given import Given
from rayfed.experiments.plan import make_plan
from rayfed.experiments.run_summary import run_summary


class Two(nn.Module):
    """Takes an image and a table, and optionally words."""

    def __init__(self, norm=False):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.rows = nn.Conv2d(2, 3, 3), nn.Linear(5, 4)
        self.norm = nn.BatchNorm1d(7) if norm else nn.Identity()
        self.last = nn.Linear(7, 3)

    def forward(self, image, table):
        z = torch.cat([self.conv(image).relu().mean((2, 3)), self.rows(table).relu()], 1)
        return self.last(self.norm(z))


class Words(nn.Module):
    """Takes words and a mask of them."""

    def __init__(self, words=9):
        super().__init__()
        self.table, self.last = nn.Embedding(words, 4), nn.Linear(4, 3)

    def forward(self, input_ids, attention_mask):
        weight = attention_mask[..., None].float()
        return self.last((self.table(input_ids) * weight).sum(1) / weight.sum(1))


def examples(n, rng):
    y = rng.permutation(n) % 3
    image = rng.integers(0, 256, (n, 2, 6, 6)).astype(np.uint8)
    return {"image": image, "table": rng.normal(size=(n, 5)) + y[:, None]}, y


def clients(count=3, sizes=(20, 20, 20)):
    rng = np.random.default_rng(0)
    return [{"train": examples(sizes[k], rng), "test": examples(8, rng)} for k in range(count)]


@pytest.fixture
def run(tmp_path):
    def run(people=None, model=Two, num_classes=None, **changes):
        values = {"results": str(tmp_path / "r"), "local.batch_size": 10, "rounds": 2, "local.lr": 0.1, "resume": False}
        people = people or clients()
        return rayfed.run(values | changes, clients=people, model=model, num_classes=num_classes, quiet=True)

    return run


def weights(result):
    return result.model().state_dict()


@pytest.fixture(params=[False, True])
def vmap_of_torch_2_11(request):
    """Torch as it is, and with a `vmap` that cannot view numbers as another dtype."""

    def view(*given):
        raise RuntimeError("Batching rule not implemented for aten::view.dtype")

    with warnings.catch_warnings(action="ignore"), torch.library._scoped_library("aten", "IMPL") as library:
        if request.param:
            library.impl("view.dtype", view, "FuncTorchBatched")
        yield


@pytest.mark.usefixtures("vmap_of_torch_2_11")
def test_parts_are_packed_and_unpacked_to_the_bit():
    rng = np.random.default_rng(0)
    tree = {
        "bits": rng.integers(0, 2, (5, 3)).astype(bool),
        "word": rng.integers(-(2**60), 2**60, 5),
        "few": rng.integers(-9, 9, (5, 1), dtype=np.int32),
        "table": rng.normal(size=(5, 2, 3)).astype(np.float32),
        "image": rng.integers(0, 256, (5, 1, 3, 3)).astype(np.uint8),
    }
    rows, layout = packed("x", tree)
    assert rows.dtype == np.int32
    assert str(layout) == "bits 3, word scalar, few 1, table 2x3, image 1x3x3"
    for batch in (slice(0, 5), slice(2, 3)):
        parts = layout.unpack(torch.from_numpy(rows[batch]))
        for name in ("bits", "word", "few", "table"):
            assert torch.equal(parts[name], torch.from_numpy(tree[name][batch]))
        assert torch.allclose(parts["image"], torch.from_numpy(tree["image"][batch]) / 255)
    both = torch.vmap(lambda x: layout.unpack(x)["word"])(torch.from_numpy(rows)[None].expand(2, 5, -1))
    assert torch.equal(both[1], torch.from_numpy(tree["word"]))
    scaled = layout.normalised((0.5,), (0.25,)).unpack(torch.from_numpy(rows))["image"]
    assert torch.allclose(scaled, (torch.from_numpy(tree["image"]) / 255 - 0.5) / 0.25, atol=1e-6)


@pytest.mark.parametrize("by_name", [True, False])
def test_fedavg_equals_a_plain_loop(run, by_name):
    people = clients(sizes=(8, 12, 20))
    given = people if by_name else [{k: (tuple(x.values()), y) for k, (x, y) in c.items()} for c in people]
    result = run(given, **{"local.batch_size": 100, "local.epochs": 2})

    def loss(model, x, y):
        image = torch.from_numpy(x["image"]) / 255
        return F.cross_entropy(model(image=image, table=torch.from_numpy(x["table"]).float()), torch.from_numpy(y))

    model = Two()
    for _ in range(2):
        trained = [reference.descend(model, *client["train"], 2, loss=loss) for client in people]
        model = reference.mean(trained, [8 / 40, 12 / 40, 20 / 40])
    reference.assert_weights(weights(result), model)
    x, y = people[0]["test"]
    with torch.no_grad():
        image, table = torch.from_numpy(x["image"]) / 255, torch.from_numpy(x["table"]).float()
        hits = result.model().eval()(image, table).argmax(1).numpy() == y
    table = result.metrics.query("client == 0 and split == 'test' and round == 2 and metric == 'accuracy'")
    assert table.value.iloc[-1] == pytest.approx(hits.mean())


@pytest.mark.usefixtures("vmap_of_torch_2_11")
def test_streamed_inputs_give_the_same_bits_and_clients_at_once_the_same_weights(run):
    whole, streamed, together = (
        weights(run(**changes)) for changes in ({}, {"placement.data_on_device": False}, {"placement.vmap_clients": 3})
    )
    assert all(torch.equal(whole[name], streamed[name]) for name in whole)
    assert all(torch.allclose(whole[name], together[name], atol=1e-5) for name in whole)


@pytest.mark.ray
def test_hosts_end_with_the_same_bits(run):
    assert len({run(**{"placement.hosts": hosts, "placement.gpus": 0}).weights_hash for hosts in (0, 2)}) == 1


def test_made_clients_and_clients_with_other_orders_give_the_same_bits(run):
    people = clients()
    turned = [{k: (dict(reversed(x.items())) if i else x, y) for k, (x, y) in c.items()} for i, c in enumerate(people)]
    first, second = weights(run(people)), weights(run(turned))
    made = rayfed.Clients({"train": [20] * 3, "test": [8] * 3}, people.__getitem__)
    third = weights(run(made, num_classes=3))
    fourth = weights(run(list(user_population(people).clients)))
    assert all(torch.equal(first[name], second[name]) and torch.equal(first[name], third[name]) for name in first)
    assert all(torch.equal(first[name], fourth[name]) for name in first)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x | {"table": x["table"][1:]}, r"clients\[1\].train: x: 20 rows of image and 19 of table"),
        (lambda x: {"image": x["image"]}, r"clients\[1\].train: x: got a dict of image 2x6x6 of uint8; expected a"),
        (lambda x: x | {"table": x["table"][:, 1:]}, "table 4 of float32; expected .*table 5 of float32"),
        (lambda x: x | {"table": np.arange(20)}, "table scalar of int64; expected"),
        (lambda x: tuple(x.values()), "got a tuple of"),
        (lambda x: x["table"], "expected image 2x6x6, table 5, got ndarray"),
        (lambda x: x | {"table": np.full((20, 5), np.nan)}, r"x\[table\]: 20 of 20 inputs hold NaN"),
        (lambda x: x | {"table": [[1, 2], [3]]}, r"x\[table\] is no array of numbers .*; rayfed\.padded makes"),
        (lambda x: x | {"image": x["image"].transpose(0, 2, 3, 1)}, "channels last"),
    ],
)
def test_clients_that_do_not_fit_are_named(run, change, message):
    people = clients()
    x, y = people[1]["train"]
    people[1]["train"] = (change(x), y)
    with pytest.raises(UsageError, match=message):
        run(people)
    if "x: " in message:
        with pytest.raises(UsageError, match=message):
            run(rayfed.Clients({"train": [20] * 3, "test": [8] * 3}, people.__getitem__), num_classes=3)


def test_a_model_that_does_not_take_the_parts_is_refused_with_its_parameters(run):
    with pytest.raises(UsageError, match="takes input_ids, attention_mask; the inputs are image 2x6x6, table 5"):
        run(model=Words)
    with pytest.raises(UsageError, match=r"model\.name=mlp: takes one input, and these have image 2x6x6, table 5"):
        run(model=None, **{"model.name": "mlp"})
    for key, name in (("augment.name", "noise"), ("algorithm.name", "mixup")):
        computes = "computes with inputs of one array, and these have image 2x6x6, table 5"
        with pytest.raises(UsageError, match=f"{key}={name}: {computes}"):
            run(**{key: name})


def test_words_outside_the_embedding_are_found_before_the_start_and_padding_has_a_mask(run):
    rng = np.random.default_rng(0)

    def part(n, high=9):
        texts = [rng.integers(1, high, size) for size in [*rng.integers(1, 7, n - 1), 7]]
        return rayfed.padded(texts, 8), np.arange(n) % 3

    x, _ = part(4)
    assert x["input_ids"].shape == (4, 8)
    assert (x["attention_mask"] == (x["input_ids"] > 0)).all()
    people = [{"train": part(20), "test": part(5)}, {"train": part(20), "test": (rayfed.padded([], 8), [])}]
    assert run(people, Words).metrics.value.notna().all()
    people[1]["test"] = part(40, 12)
    with pytest.raises(UsageError, match=r"which are input_ids 8, attention_mask 8, from 0 to 11 .*vocabulary=12"):
        run(people, Words)
    with pytest.raises(ValueError, match="negative"):
        rayfed.padded([np.arange(7)], 6)


def test_batch_norm_and_the_summary_know_the_parts(tmp_path):
    people = clients(sizes=(21, 20, 20))
    values = {"results": str(tmp_path), "local.batch_size": 10, "local.drop_last": False}
    config = Config.read(values)
    with pytest.raises(UsageError, match="leave a batch of one example"):
        make_plan(config, Given(clients=people, model=lambda: Two(norm=True)))
    plan = make_plan(config, Given(clients=people, model=Two))
    assert plan.cost.macs == 2 * 9 * 3 * 16 + 5 * 4 + 7 * 3
    assert "input shape image 2x6x6, table 5" in run_summary(plan)


@dataclass(frozen=True)
class Scans:
    """A dataset of one image, a table and a test set, normalised as it says."""

    def load(self):
        x, y = examples(30, np.random.default_rng(0))
        tests = (TestSet("far", "test", Examples({name: part[:4] for name, part in x.items()}, y[:4])),)
        return Dataset.of("scans", inputs=x, labels=y, mean=(0.5, 0.25), std=(0.5, 0.5), tests=tests)


def test_a_dataset_of_parts_is_normalised_and_has_test_sets():
    people = load(f"{__name__}:Scans", {}, "iid", {"clients": 2})
    x, _ = examples(30, np.random.default_rng(0))
    seen = people.layout.unpack(torch.from_numpy(people.tests[0].examples.x))
    mean = torch.tensor([0.5, 0.25]).view(2, 1, 1)
    assert torch.allclose(seen["image"], (torch.from_numpy(x["image"][:4]) / 255 - mean) / 0.5, atol=1e-6)
    assert people.tests[0].examples.shape == people.shape == people.clients[0].train.shape


def test_a_dataset_of_parts_reads_rows_of_files_when_they_are_needed(tmp_path):
    rng = np.random.default_rng(0)
    x, y = examples(30, rng)
    x["table"] = x["table"].astype(np.float32)
    np.save(tmp_path / "image.npy", x["image"])
    mapped = {"image": np.load(tmp_path / "image.npy", mmap_mode="r"), "table": x["table"]}
    whole, lazy = (Dataset.of("d", inputs=tree, labels=y) for tree in (x, mapped))
    assert isinstance(whole.images, np.ndarray)
    assert not isinstance(lazy.images, np.ndarray)
    rows = np.array([7, 3, 3, 29])
    assert np.array_equal(whole.select(rows).x, lazy.select(rows).read().x)
    assert lazy.layout == whole.layout
    by_place = Dataset.of("d", (x["image"], x["table"]), y)
    assert np.array_equal(by_place.images, whole.images)
    assert not by_place.layout.by_name


@pytest.mark.parametrize("name", ["csv", "parquet", "huggingface"])
def test_columns_of_a_table_become_parts(tmp_path, name):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(40, 3)).round(3), columns=["a", "b", "c"]).assign(label=np.arange(40) % 3)
    path = tmp_path / ("t.csv" if name == "csv" else "train.parquet")
    if name != "csv":
        frame["words"] = list(rng.integers(0, 9, (40, 4)))
    frame.to_csv(path, index=False) if name == "csv" else frame.to_parquet(path)
    data = {"file": str(path)} if name != "huggingface" else {"folder": str(tmp_path)}
    data["features"] = {"vitals": ["b", "a"], "labs": "c"} | ({} if name == "csv" else {"ids": ["words"]})
    people = load(name, data, "iid", {"clients": 2})
    assert str(people.layout) == "vitals 2, labs 1" + ("" if name == "csv" else ", ids 4")
    parts = people.layout.unpack(torch.from_numpy(people.clients[0].train.x))
    known = frame[["b", "a", "c"]].to_numpy(np.float32)
    for number in range(len(parts["labs"])):
        (row,) = np.flatnonzero((known == [*parts["vitals"][number], *parts["labs"][number]]).all(1))
        assert name == "csv" or parts["ids"][number].tolist() == list(frame["words"][row])
    with pytest.raises(UsageError, match=r"label is data\.label, which would leak"):
        load(name, data | {"features": {"vitals": ["a"], "labs": "label"}}, "iid", {"clients": 2})


def test_texts_become_tokens_and_a_mask(tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<unk>", "a", "good", "bad", "film"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    saved = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<pad>")
    saved.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "data").mkdir()
    frame = pd.DataFrame({"text": ["a good film", "bad"], "label": [1, 0], "stars": [4, 1]})
    frame.to_parquet(tmp_path / "data" / "train.parquet")
    data = {"folder": str(tmp_path / "data"), "tokenizer": str(tmp_path / "tokenizer")}
    people = load("huggingface", data | {"max_length": 2}, "iid", {"clients": 1, "test": 0.5})
    client = people.clients[0]
    parts = people.layout.unpack(torch.from_numpy(np.concatenate([client.train.x, client.test.x])))
    order = np.argsort(-np.concatenate([client.train.y, client.test.y]))
    assert parts["input_ids"][order].tolist() == [[2, 3], [4, 0]]
    assert parts["attention_mask"][order].tolist() == [[1, 1], [1, 0]]
    assert str(load("huggingface", data, "iid", {"clients": 1, "test": 0.5}).layout) == "input_ids 3, attention_mask 3"
    with pytest.raises(UsageError, match=r"data\.tokenizer=nowhere: no such folder"):
        load("huggingface", data | {"tokenizer": "nowhere"}, "iid", {"clients": 1})
