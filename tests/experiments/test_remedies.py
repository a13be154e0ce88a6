"""What is refused rightly says what to do: YAML's booleans, seeds given twice, kinds of inputs and labels."""

import numpy as np
import pytest
import torch
from torch import nn

from rayfed.core.errors import UsageError
from rayfed.experiments.config import Config
from rayfed.experiments.given import Given
from rayfed.experiments.plan import make_plan
from rayfed.experiments.sources import from_arguments
from rayfed.experiments.space import read_space

SIZE = 12
X = np.random.default_rng(0).normal(size=(SIZE, 3)).astype(np.float32)
Y = np.arange(SIZE) % 2
IMAGES = np.random.default_rng(0).integers(0, 255, (SIZE, 1, 8, 8))


def refusal(x, y, *, model=None, loss=None, **values):
    """The message with which a plan refuses two equal clients."""
    client = {"train": (x, y), "test": (x, y)}
    named = {"model.name": "mlp"} if model is None else {}
    with pytest.raises(UsageError) as caught:
        make_plan(Config.read({**named, **values}), Given(clients=[client, client], model=model, loss=loss))
    return str(caught.value)


class TestWordsOfYaml:
    @pytest.mark.parametrize(
        ("pair", "words"),
        [
            ("experiment=no", 'experiment=False: expected a string, got bool; .* in quotes, such as "off" or "no"'),
            (
                "data.domains=[on, plain]",
                'data.domains=.*: expected a list of strings, got True in it; .*"on" or "yes"',
            ),
            (
                "data.domains=off",
                "data.domains=False: expected a list of strings, got bool; in YAML on, off, yes and no",
            ),
            ("algorithm.name=on", "algorithm.name=True: expected a string, got bool; in YAML on, off, yes and no mean"),
        ],
    )
    def test_are_to_be_quoted(self, pair, words):
        with pytest.raises(UsageError, match=words):
            Config.read(from_arguments([pair]))

    def test_of_numbers_are_not_meant(self):
        with pytest.raises(UsageError, match=r"local.lr=True: expected a number, got bool$"):
            Config.read(from_arguments(["local.lr=on"]))


class TestValuesGivenTwice:
    def test_seeds(self):
        with pytest.raises(UsageError, match=r"^seeds: 0 is there 2 times; give each value once$"):
            read_space({"seeds": [0, 1, 0]})

    def test_of_a_grid(self):
        with pytest.raises(UsageError, match=r"^local.lr: grid: 0.1 is there 2 times; give each value once$"):
            read_space({"local.lr": {"grid": [0.1, 0.2, 0.1]}})
        assert len(read_space({"local.lr": {"grid": [1, 1.0]}}).arms[0]) == 2


class TestLabels:
    @pytest.mark.parametrize("kind", [np.float64, np.int64, bool])
    def test_one_hot_ones_of_clients(self, kind):
        expected = "loss: labels are one-hot, and it takes classes [n]: give y.argmax(1)"
        assert refusal(X, np.eye(2)[Y].astype(kind)) == expected

    def test_one_hot_ones_of_a_file(self, tmp_path):
        np.savez(tmp_path / "own.npz", images=X, labels=np.eye(2)[Y], client=Y, is_test=np.arange(SIZE) % 4 == 0)
        with pytest.raises(
            UsageError, match=r"cross_entropy: .*; these are one-hot, so give their classes, y.argmax\(1\)"
        ):
            make_plan(Config.read({"data": {"name": "npz", "file": str(tmp_path / "own.npz")}, "model.name": "mlp"}))

    def test_several_labels_are_not_one_hot(self):
        assert "labels torch.int64 [2, 2]" in refusal(X, np.stack([Y, Y], 1))

    @pytest.mark.parametrize("weight", [[1.0], [1.0, 9.0, 3.0]])
    def test_class_weights_of_another_length(self, weight):
        expected = f"loss: has {len(weight)} class weights, and the model has 2 outputs: give one for each class"
        assert refusal(X, Y, **{"loss.weight": weight}) == expected
        loss = nn.CrossEntropyLoss(weight=torch.tensor(weight))
        assert refusal(X, Y, model=nn.Linear(3, 2), loss=loss) == expected


class TestModels:
    @pytest.mark.parametrize("kind", [torch.float64, torch.float16])
    def test_of_other_floats(self, kind):
        words = f"its weights are {str(kind)[6:]}, and rayfed computes in float32: make it with .float() at the end"
        assert refusal(X, Y, model=nn.Linear(3, 2).to(kind)).endswith(words)
        assert refusal(X, Y, model=lambda: nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2).to(kind))).endswith(words)

    @pytest.mark.parametrize("kind", [np.int16, np.uint16, np.int64, np.uint32])
    @pytest.mark.parametrize("own", [False, True])
    def test_images_of_other_integers(self, kind, own):
        model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 2)) if own else None
        words = "give float32, such as (x / x.max()).astype('float32') with one maximum for all clients"
        assert refusal(IMAGES.astype(kind), Y, model=model).endswith(words)

    def test_images_of_a_file(self, tmp_path):
        images = IMAGES.astype(np.uint16)
        np.savez(tmp_path / "own.npz", images=images, labels=Y, client=Y, is_test=np.arange(SIZE) % 4 == 0)
        with pytest.raises(UsageError, match=r"images of other types than uint8 are not scaled: give float32, such as"):
            make_plan(Config.read({"data": {"name": "npz", "file": str(tmp_path / "own.npz")}, "model.name": "mlp"}))

    def test_masks(self):
        assert refusal(IMAGES > 9, Y).endswith("give them as float32, by x.astype('float32')")

    def test_numbers_and_words(self):
        assert refusal(np.full((SIZE, 3), 7), Y).endswith("as one with model.vocabulary=8")
        words = "subtract the first of times, or number codes from 0, and give them as float32"
        assert refusal(np.full((SIZE, 3), 200_000_001), Y).endswith(words)
