"""A client's training examples as training sees them: what AFL's and VM's losses are taken over."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from helpers.federations import blobs, blueprint, new_server, with_inputs
from rayfed.algorithms.weights_by_losses import AFL, VM, GenAFL
from rayfed.augment.base import Augment, ImageAugment, Noise
from rayfed.augment.images import Rotation, rotate
from rayfed.core.ids import Moment
from rayfed.core.optim import SGD
from rayfed.core.rng import Streams
from rayfed.engine.device_data import Augmented, Normalise, Part, Streamed
from rayfed.engine.purity import ImpureHook, intercepted, pure
from rayfed.experiments.checks import check_trial
from rayfed.models.base import build_model

SIZES = (20, 26, 33)
CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Turned(ImageAugment):
    """Every image by the same angle."""

    def __call__(self, x):
        return rotate(x, torch.full((len(x),), 45.0))


@dataclass(frozen=True, kw_only=True)
class InPlace(Augment):
    """Changes what it is given, as an augmentation may."""

    after_normalisation = True

    def __call__(self, x):
        return x.mul_(-1)


def people():
    """uint8 images [1, 6, 6] of three clients."""

    def pixels(x):
        x = np.kron(x.reshape(-1, 1, 2, 3), np.ones((1, 1, 3, 2)))
        return (x * 40 + 128).clip(0, 255).astype(np.uint8)

    return with_inputs(blobs(3, sizes=SIZES), pixels, shape=(1, 6, 6), mean=(0.5,), std=(0.25,))


def small():
    torch.manual_seed(0)
    return build_model("mlp", {"hidden": [8]}, (1, 6, 6), 3)


def spy(algorithm, seen):
    """`algorithm`, noting each client's loss by round."""

    def around(name, hook, self, *args, **kwargs):
        result = hook(self, *args, **kwargs)
        if name == "finish" and "loss" in result[1]:  # there is none in the setup
            seen[args[0].round, args[0].client] = result[1]["loss"].item()
        return result

    return intercepted(algorithm, around)


def losses(algorithm, augment, **changes):
    """What each client reports in each of two rounds, and the server afterwards."""
    seen = {}
    clients = people()
    plan = blueprint(spy(algorithm, seen), clients, model=small(), augment=augment, **changes)
    check_trial(plan, clients)
    server = new_server(plan, clients, points=("trained",), every=9)
    list(server.run())
    return seen, server


def pixels(client):
    return torch.from_numpy(people().clients[client].train.x).float() / 255


def by_hand(model, x, client):
    """The loss of `model` on the images `x` in [0, 1], normalised."""
    with torch.no_grad():
        y = torch.from_numpy(people().clients[client].train.y)
        return F.cross_entropy(model((x - 0.5) / 0.25), y).item()


@pytest.mark.parametrize("algorithm", [AFL(), GenAFL()])
def test_a_turn_by_45_degrees_has_the_loss_that_it_has_by_hand(algorithm):
    plain, _ = losses(algorithm, None)
    found, _ = losses(algorithm, Turned())
    model = small().eval()
    for i in range(3):
        assert plain[1, i] == pytest.approx(by_hand(model, pixels(i), i), abs=1e-6)
        expected = by_hand(model, rotate(pixels(i), torch.full((SIZES[i],), 45.0)), i)
        assert found[1, i] == pytest.approx(expected, abs=1e-6)
        assert abs(found[1, i] - plain[1, i]) > 0.01


def test_random_turns_are_those_of_the_seed_of_client_and_round():
    found, _ = losses(AFL(), Rotation(degrees=45), optimizer=SGD(lr=1e-9))
    model = small().eval()  # and so it stays
    for (round, i), loss in found.items():
        Streams(0).begin("augmented data", Moment("round", round), client=i, batch=0)
        expected = by_hand(model, rotate(pixels(i), torch.empty(SIZES[i]).uniform_(-45, 45)), i)
        assert loss == pytest.approx(expected, abs=1e-6)
    assert len(set(found.values())) == 6


def test_vm_takes_the_trained_models_loss_over_augmented_examples():
    ends, found = {}, {}

    class Watched(VM):
        def finish(self, ctx, work, client, down, data):
            kept, up = super().finish(ctx, work, client, down, data)
            ends[ctx.client], found[ctx.client] = up["weights"], up["loss"].item()
            return kept, up

    losses(Watched(beta=0.0), Turned(), rounds=1)
    model = small().eval()
    for i, weights in ends.items():
        model.load_state_dict(weights)
        expected = by_hand(model, rotate(pixels(i), torch.full((SIZES[i],), 45.0)), i)
        assert found[i] == pytest.approx(expected, abs=1e-6)
        assert abs(expected - by_hand(model, pixels(i), i)) > 0.01


@pytest.mark.parametrize("algorithm", [AFL(lambda_lr=0.5), VM(beta=0.5)])
def test_where_data_lies_and_how_many_train_at_once_does_not_matter(algorithm):
    augment = Rotation(degrees=45)
    expected, server = losses(algorithm, augment)
    assert len(set(expected.values())) == 6
    streamed, other = losses(algorithm, augment, data_on_device=False)
    assert streamed == expected
    assert other.state_hash() == server.state_hash()
    together, _ = losses(algorithm, augment, vmap_clients=3)
    assert together == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("data_on_device", [True, False])
@pytest.mark.parametrize("algorithm", [AFL(), VM(beta=0.5)])
def test_the_clients_data_are_only_lent(algorithm, data_on_device):
    """`pure` compares all that a hook is lent, bit for bit, the data among it."""
    clients = people()
    changes = {"model": small(), "augment": InPlace(), "data_on_device": data_on_device}
    plan = blueprint(intercepted(algorithm, pure), clients, **changes)
    list(new_server(plan, clients, points=("trained",)).run())

    class Careless(AFL):
        def finish(self, ctx, work, client, down, data):
            data.as_trained.y.data.zero_()
            return super().finish(ctx, work, client, down, data)

    plan = blueprint(intercepted(Careless(), pure), clients, **changes)
    with pytest.raises(ImpureHook, match=r"^finish changed"):
        list(new_server(plan, clients, points=("trained",)).run())


class TestAugmented:
    def part(self, *, data_on_device=True):
        clients = people()
        return Part(
            clients.clients[1].train, CPU, Normalise(clients, CPU, channels_last=False), data_on_device=data_on_device
        )

    def test_batches_are_drawn_by_key_and_number_and_leave_the_generator_alone(self):
        augment = Noise()
        part, other = self.part(), self.part(data_on_device=False)
        assert isinstance(other.x, Streamed)
        torch.manual_seed(5)
        state = torch.get_rng_state()
        one = list(Augmented(part, augment, partial(Streams(1).begin, "test")).batches(10))
        assert torch.equal(torch.get_rng_state(), state)
        assert [len(batch.y) for batch in one] == [10, 10, 6]
        for again in (
            Augmented(part, augment, partial(Streams(1).begin, "test")),
            Augmented(other, augment, partial(Streams(1).begin, "test")),
        ):
            for batch, same in zip(one, again.batches(10), strict=True):
                assert torch.equal(batch.x, same.x)
                assert torch.equal(batch.y, same.y)
        for number, (batch, plain) in enumerate(zip(one, part.batches(10), strict=True)):
            Streams(1).begin("test", batch=number)
            torch.testing.assert_close(batch.x, augment(plain.x.clone()))
            assert torch.equal(batch.y, plain.y)
        another = next(Augmented(part, augment, partial(Streams(2).begin, "test")).batches(10))
        assert not torch.equal(another.x, one[0].x)

    def test_rows_may_be_chosen(self):
        part = self.part()
        view = Augmented(part, InPlace(), partial(Streams(1).begin, "test"))
        rows = torch.tensor([7, 3, 3, 25])
        stored = part.x.clone()
        made, plain = (list(some.batches(3, rows)) for some in (view, part))
        assert [len(batch.y) for batch in made] == [3, 1]
        for batch, own in zip(made, plain, strict=True):
            assert torch.equal(batch.x, -own.x)
            assert torch.equal(batch.y, own.y)
        assert torch.equal(part.x, stored)
        assert len(view) == len(part) == 26
        assert view.y is part.y
