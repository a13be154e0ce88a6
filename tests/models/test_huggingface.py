"""Models of transformers, with adapters of peft: random encoders of two layers, and a pretrained one in slow tests."""

import copy
import pickle
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import rayfed
from helpers.federations import simulate
from rayfed.core.errors import UsageError
from rayfed.experiments.config import Config
from rayfed.experiments.given import Given
from rayfed.experiments.plan import make_plan
from rayfed.models.base import build_model

WORDS, LENGTH = 40, 6


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Folders with random models: an encoder without a classifier, and a decoder without a token for padding."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    torch.manual_seed(0)
    small = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    bert = transformers.BertConfig(**small, intermediate_size=32, max_position_embeddings=16)
    gpt2 = transformers.GPT2Config(**small, n_positions=16, bos_token_id=1, eos_token_id=1)
    models = {"encoder": transformers.BertModel(bert), "decoder": transformers.GPT2LMHeadModel(gpt2)}
    folder = tmp_path_factory.mktemp("models")
    for name, model in models.items():
        model.save_pretrained(folder / name)
    return {name: str(folder / name) for name in models}


def texts(*sizes, positions=False):
    """Clients with token numbers, 0 for padding, whose class is whether the first word is a frequent one."""
    rng, clients = np.random.default_rng(0), []
    for size in sizes:
        x = rng.integers(1, WORDS, (size, LENGTH))
        x[::2, 4:] = 0
        part = x, x if positions else (x[:, 0] < 15).astype(np.int64)
        clients.append({"train": part, "val": part, "test": part})
    return clients


@pytest.fixture
def plan(sources, tmp_path):
    def plan(clients=None, source="encoder", **changes):
        values = {"model.name": "huggingface", "model.source": sources[source], "results": str(tmp_path), "rounds": 2}
        values |= {"local.batch_size": 10, "local.lr": 0.1, "local.momentum": 0.5} | changes
        return make_plan(Config.read(values), Given(clients=clients or texts(20, 30)))

    return plan


def finished(plan):
    return simulate(plan.blueprint, plan.population, every=plan.config.rounds)


@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 6}])
def test_training_is_that_of_a_plain_loop(plan, lora):
    """With one client, the mean is its model; a batch is all of its data."""
    (client,) = people = texts(20)
    options = {"local.batch_size": 20, "local.epochs": 3, "rounds": 1, "model.lora": lora}
    made = plan(people, **options)
    model = copy.deepcopy(made.blueprint.model).eval()  # without dropout, as a plain loop has no keyed streams
    for layer in made.blueprint.model.modules():
        if isinstance(layer, torch.nn.Dropout):
            layer.p = 0.0
    server, records = finished(made)
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    sgd = torch.optim.SGD(trained.values(), lr=0.1, momentum=0.5)
    x, y = map(torch.from_numpy, client["train"])
    for _ in range(3):
        sgd.zero_grad()
        F.cross_entropy(model.network(input_ids=x, attention_mask=(x != 0).long()).logits, y).backward()
        sgd.step()
    weights = server.state["weights"]
    assert trained.keys() == weights.keys()
    assert (
        records[-1].bytes_up == records[-1].bytes_down == {"weights": sum(value.nbytes for value in weights.values())}
    )
    for name, value in trained.items():
        torch.testing.assert_close(weights[name], value.detach(), rtol=1e-4, atol=1e-6)
    if lora is not None:
        names = {name.rpartition("lora_")[2] if "lora_" in name else name.rpartition(".")[2] for name in trained}
        assert names == {"A.default.weight", "B.default.weight", "weight", "bias"}
        assert sum(value.numel() for value in trained.values()) == 2 * 2 * 2 * 4 * 16 + 2 * 16 + 2


def test_dropout_is_drawn_from_keyed_streams_also_after_a_journey(plan):
    """What is sent to a host has the constants, and gives the same bits as the model that was built."""
    lora = {"rank": 2, "dropout": 0.5, "train": "b"}
    made = plan(**{"model.lora": lora})
    sent = replace(made, blueprint=pickle.loads(pickle.dumps(made.blueprint)))
    weights = [finished(p)[0].state["weights"] for p in (made, sent, plan(**{"model.lora": lora | {"dropout": 0.0}}))]
    assert all(".lora_B." in name or ".classifier." in name for name in weights[0])
    same, other = (all(torch.equal(weights[0][name], w[name]) for name in w) for w in weights[1:])
    assert same
    assert not other


def test_positions_with_padding_are_masked(sources):
    model = build_model("huggingface", {"source": sources["encoder"]}, (LENGTH,), 2, torch.int64).eval()
    x = torch.tensor([[3, 4, 5, 0, 0, 0], [3, 4, 5, 6, 7, 8], [0] * 6])
    whole = model(x)
    torch.testing.assert_close(whole[:1], model(x[:1, :3]))
    assert torch.isfinite(whole).all()


@pytest.mark.parametrize(
    ("task", "source", "classes"), [("token_classification", "encoder", WORDS), ("causal_lm", "decoder", WORDS)]
)
def test_tasks_with_a_label_at_each_position_train(plan, task, source, classes):
    options = {"model.task": task, "model.lora": {"rank": 2}, "local.epochs": 5}
    made = plan(texts(20, 30, positions=True), source, **options)
    assert made.blueprint.outputs.kind == "positions"
    task_of = made.blueprint.context(made.population, "cpu").task
    x, y = (torch.from_numpy(value) for value in texts(20, positions=True)[0]["train"])
    server, _ = finished(made)
    losses = [
        float(task_of.loss(task_of.predict(w, x), y)) for w in (task_of.initial_weights(), server.state["weights"])
    ]
    assert losses[1] < losses[0]
    assert task_of.predict(server.state["weights"], x).shape == (20, classes, LENGTH)


def test_adapters_are_saved_in_the_format_of_peft(sources, tmp_path):
    values = {"model.name": "huggingface", "model.source": sources["encoder"], "results": str(tmp_path / "r")}
    values |= {"model.lora": {"rank": 2}, "rounds": 1, "local.lr": 0.5, "algorithm.name": "fedper"}
    result = rayfed.run(values, clients=texts(20, 30), quiet=True)
    assert result.model(0) is not None  # a method that needs a split finds the classifier
    result = rayfed.run(values | {"algorithm.name": "fedavg"}, clients=texts(20, 30), quiet=True)
    model = result.model().eval()
    result.save(tmp_path / "saved")
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    base = AutoModelForSequenceClassification.from_pretrained(sources["encoder"], num_labels=2)
    (folder,) = {path.parent for path in (tmp_path / "saved").rglob("adapter_model.safetensors")}
    loaded = PeftModel.from_pretrained(base, str(folder)).eval()
    x = torch.from_numpy(texts(4)[0]["train"][0])
    torch.testing.assert_close(loaded(input_ids=x, attention_mask=(x != 0).long()).logits, model(x))
    assert load_file(tmp_path / "saved" / "model.safetensors").keys() <= model.state_dict().keys()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.source": "/no/such/folder"}, "model.source=/no/such/folder: neither a folder nor found"),
        ({"model.source": str(Path(__file__).parent)}, "model.source=.*: holds no model for model.task="),
        ({"model.lora": {"targets": ["query", "valve"]}}, "model.lora.targets=valve: no layer .* did you mean value"),
        ({"model.lora": {"rnk": 2}}, "model.lora.rnk: no such key; did you mean model.lora.rank"),
        ({"model.lora": {"rank": 0}}, "model.lora.rank=0: must be at least 1"),
        ({"model.freeze": ["*nothing*"]}, r"model.freeze=\*nothing\*: no weight has such a name"),
        ({"placement.vmap_clients": 2}, "placement.vmap_clients=2: torch cannot vectorise a training step of model"),
    ],
)
def test_refusals_are_one_line(plan, changes, message):
    with pytest.raises(UsageError, match="^" + message):
        plan(texts(20, 20), **changes)


@pytest.mark.parametrize("package", ["transformers", "peft"])
def test_a_package_that_is_missing_is_named_with_its_remedy(request, monkeypatch, package):
    source = "any" if package == "transformers" else request.getfixturevalue("sources")["encoder"]
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError, match=rf"package {package} is not installed; pip install 'rayfed-sim\[text\]'"):
        build_model("huggingface", {"source": source, "lora": {}}, (LENGTH,), 2, torch.int64)


@pytest.mark.parametrize("name", ["flora", "het_lora"])
@pytest.mark.parametrize("source", ["encoder", "decoder"])
def test_clients_have_adapters_of_their_own_rank(sources, tmp_path, name, source):
    """GPT-2 has its weights transposed."""
    values = {"model.name": "huggingface", "model.source": sources[source], "results": str(tmp_path), "rounds": 2}
    values |= {"model.lora": {"rank": 3}, "algorithm": {"name": name, "ranks": [1, 3]}, "local.lr": 0.1}
    values["model.task"] = "sequence_classification" if source == "encoder" else "causal_lm"
    result = rayfed.run(values, clients=texts(20, 30, positions=source == "decoder"), quiet=True)
    trained = {key for key, value in result.model().named_parameters() if value.requires_grad}
    sizes = [value.numel() for key, value in result.model().named_parameters() if key in trained and "lora_" in key]
    others = sum(value.numel() for key, value in result.model().named_parameters() if key in trained) - sum(sizes)
    assert (result.rounds.bytes_up == 4 * (sum(sizes) * 4 // 3 + 2 * others)).all()
    scores = result.metrics.query("metric == 'loss' and split == 'test'").groupby("round").value.mean()
    assert scores.iloc[-1] < np.log(2 if source == "encoder" else WORDS) + 0.05
