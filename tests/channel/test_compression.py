"""Compression: what is decoded, how long a real encoding is, what error feedback keeps, and what counts as sent."""

import math
import struct

import numpy as np
import pytest
import torch

from helpers.federations import blobs, blueprint, net, simulate
from rayfed.algorithms.common.channelled import Channelled
from rayfed.algorithms.fedavg import FedAvg
from rayfed.algorithms.fedproto import FedProto
from rayfed.algorithms.scaffold import Scaffold
from rayfed.channel.channel import Channel
from rayfed.channel.compression import Cast, Compression, Qsgd, RandK, Sign, TopK
from rayfed.core.trees import nbytes
from rayfed.engine.clock import Clock

SIZES = (40, 7, 1, 300)
ALL = [
    TopK(share=0.1),
    TopK(share=1.0),
    RandK(share=0.1),
    RandK(share=0.1, feedback=True),
    Qsgd(levels=1),
    Qsgd(levels=15),
    Sign(),
    Cast(type="bf16"),
    Cast(type="float16"),
    Cast(type="int8"),
]
EACH = pytest.mark.parametrize("compression", ALL, ids=str)


def vector(seed=0):
    return torch.randn(sum(SIZES), generator=torch.Generator().manual_seed(seed))


def decoded(compression, given, seed=0):
    torch.manual_seed(seed)
    return compression.decoded(given, SIZES)


def channelled(method, **parts):
    return Channelled(base=method, channel=Channel(**parts))


# What is decoded


def test_topk_keeps_the_largest_of_all_tensors():
    given = vector()
    largest = set(np.argsort(-np.abs(given.numpy()))[:35].tolist())
    expected = [value if place in largest else 0.0 for place, value in enumerate(given.tolist())]
    assert decoded(TopK(share=0.1), given).tolist() == expected
    assert decoded(TopK(share=1e-9), given).count_nonzero() == 1


def test_randk_is_unbiased_without_feedback_and_keeps_values_with_it():
    given = vector()
    kept = decoded(RandK(share=0.25, feedback=True), given)
    places = kept.nonzero().flatten()
    assert len(places) == 87
    assert torch.equal(kept[places], given[places])
    scaled = decoded(RandK(share=0.25), given)
    torch.testing.assert_close(scaled, kept * 348 / 87)
    chosen = torch.stack([decoded(RandK(share=0.25), given, seed) != 0 for seed in range(2000)]).double().mean(0)
    error = math.sqrt(0.25 * 0.75 / 2000)
    assert (chosen - 0.25).abs().max() < 5 * error


def test_qsgd_rounds_to_a_neighbouring_level_without_bias_and_within_the_papers_variance():
    given = vector()
    for levels in (1, 4, 63):
        draws = torch.stack([decoded(Qsgd(levels=levels), given, seed) for seed in range(3000)]).double()
        bound = 0.0
        for part, of_part in zip(given.double().split(SIZES), draws.split(SIZES, 1), strict=True):
            n, norm = len(part), part.norm()
            exact, steps = part / norm * levels, of_part / norm * levels
            torch.testing.assert_close(steps, steps.round(), atol=1e-3, rtol=0)
            assert ((steps - exact).abs() < 1 + 1e-3).all()
            above = exact.abs() - exact.abs().floor()
            error = (above * (1 - above) / len(draws)).sqrt()
            assert ((steps.mean(0) - exact).abs() <= 5 * error + 1e-5).all()
            bound += min(n / levels**2, math.sqrt(n) / levels) * float(norm**2)
        variance = (draws - given).square().sum(1).mean()
        assert 0 < variance <= bound


def test_sign_scales_by_the_mean_size_of_each_tensor():
    given = vector()
    expected = [part.abs().mean() * torch.where(part < 0, -1.0, 1.0) for part in given.split(SIZES)]
    torch.testing.assert_close(decoded(Sign(), given), torch.cat(expected))


def test_casts_round_to_the_nearest_number():
    given = torch.cat([vector()[:-2], torch.tensor([1e6, -1e6])])
    half = decoded(Cast(type="float16"), given)
    assert half[-2:].tolist() == [65504.0, -65504.0]  # and not infinite
    torch.testing.assert_close(half[:-2], torch.from_numpy(given[:-2].numpy().astype(np.float16)).float())
    assert ((decoded(Cast(), given) - given).abs() <= given.abs() / 256).all()
    whole = decoded(Cast(type="int8"), vector())
    for part, of_part in zip(vector().split(SIZES), whole.split(SIZES), strict=True):
        scale = part.abs().max() / 127
        assert ((part - of_part).abs() <= scale / 2 * (1 + 1e-5)).all()


@EACH
def test_nothing_is_decoded_as_nothing(compression):
    assert decoded(compression, torch.zeros(sum(SIZES))).count_nonzero() == 0


# How long an encoding is


def bits_of(numbers, width):
    """Pack non-negative integers of `width` bits each."""
    places = np.arange(width)
    return np.packbits((np.asarray(numbers, np.int64)[:, None] >> places) & 1).tobytes()


def numbers_of(content, width, count):
    flags = np.unpackbits(np.frombuffer(content, np.uint8))[: count * width].reshape(count, width)
    return (flags.astype(np.int64) << np.arange(width)).sum(1)


def round_trip_of_sparse(sent, n, width):
    """Encode the numbers that are not 0 with their places, and return the encoding and what it decodes to."""
    places = sent.nonzero().flatten().numpy()
    values = sent[places].numpy().astype("<f4").tobytes()
    content = values + bits_of(places, width)
    again = torch.zeros(n)
    count = len(places)
    found = numbers_of(content[4 * count :], width, count)
    again[found] = torch.from_numpy(np.frombuffer(content[: 4 * count], "<f4").copy())
    return content, again


def test_a_real_encoding_of_topk_is_as_long_as_stated():
    given = vector()
    sent = decoded(TopK(share=0.1), given)
    content, again = round_trip_of_sparse(sent, 348, 9)
    assert torch.equal(again, sent)
    assert len(content) == TopK(share=0.1).nbytes(SIZES) == 4 * 35 + math.ceil(35 * 9 / 8)
    assert TopK(share=0.99).nbytes(SIZES) == 4 * 348  # all numbers without places are shorter


def test_a_real_encoding_of_randk_is_a_seed_and_the_numbers():
    given, compression = vector(), RandK(share=0.1, feedback=True)
    sent = decoded(compression, given, seed=17)
    torch.manual_seed(17)
    places = torch.randperm(348)[:35]
    content = struct.pack("<q", 17) + given[places].numpy().astype("<f4").tobytes()
    torch.manual_seed(*struct.unpack("<q", content[:8]))
    again = torch.zeros(348)
    again[torch.randperm(348)[:35]] = torch.from_numpy(np.frombuffer(content[8:], "<f4").copy())
    assert torch.equal(again, sent)
    assert len(content) == compression.nbytes(SIZES)


@pytest.mark.parametrize("levels", [1, 15, 16, 1000])
def test_a_real_encoding_of_qsgd_is_as_long_as_stated(levels):
    given, compression = vector(), Qsgd(levels=levels)
    sent, content, again = decoded(compression, given), b"", []
    width = (2 * levels).bit_length()
    for part, of_part in zip(given.split(SIZES), sent.split(SIZES), strict=True):
        scale = np.float32(float(part.norm()) / levels)
        steps = np.rint(of_part.numpy() / scale).astype(np.int64)
        encoded = struct.pack("<f", scale) + bits_of(steps + levels, width)
        content += encoded
        (unpacked,) = struct.unpack("<f", encoded[:4])
        again.append(torch.from_numpy((numbers_of(encoded[4:], width, len(part)) - levels) * np.float32(unpacked)))
    torch.testing.assert_close(torch.cat(again).float(), sent)
    assert len(content) == compression.nbytes(SIZES)


def test_a_real_encoding_of_signs_is_as_long_as_stated():
    sent, content, again = decoded(Sign(), vector()), b"", []
    for part in sent.split(SIZES):
        encoded = struct.pack("<f", float(part.abs()[0])) + bits_of((part < 0).numpy(), 1)
        content += encoded
        (scale,) = struct.unpack("<f", encoded[:4])
        again.append(torch.from_numpy(np.where(numbers_of(encoded[4:], 1, len(part)) == 1, -scale, scale)).float())
    assert torch.equal(torch.cat(again), sent)
    assert len(content) == Sign().nbytes(SIZES)


@pytest.mark.parametrize("name", ["bf16", "float16"])
def test_a_real_encoding_of_short_floats_is_as_long_as_stated(name):
    dtype = torch.bfloat16 if name == "bf16" else torch.float16
    sent = decoded(Cast(type=name), vector())
    content = sent.to(dtype).view(torch.int16).numpy().tobytes()
    again = torch.from_numpy(np.frombuffer(content, np.int16).copy()).view(dtype).float()
    assert torch.equal(again, sent)
    assert len(content) == Cast(type=name).nbytes(SIZES)


def test_a_real_encoding_of_bytes_is_as_long_as_stated():
    sent, content, again = decoded(Cast(type="int8"), vector()), b"", []
    for part, given in zip(sent.split(SIZES), vector().split(SIZES), strict=True):
        scale = given.abs().max() / 127
        encoded = struct.pack("<f", float(scale)) + (part / scale).round().to(torch.int8).numpy().tobytes()
        content += encoded
        steps = torch.from_numpy(np.frombuffer(encoded[4:], np.int8).copy())
        again.append(steps * torch.tensor(struct.unpack("<f", encoded[:4])[0]))
    assert torch.equal(torch.cat(again), sent)
    assert len(content) == Cast(type="int8").nbytes(SIZES)


# Error feedback


@pytest.mark.parametrize("compression", [TopK(share=0.05), RandK(share=0.2, feedback=True)])
def test_what_was_sent_and_the_error_are_all_updates_exactly(compression):
    """Updates are multiples of 2⁻⁶, so that their sums are exact."""
    error, total, sent = torch.zeros(348), torch.zeros(348), torch.zeros(348)
    for number in range(50):
        update = (vector(number) * 64).round() / 64
        torch.manual_seed(number)
        decoded = compression.decoded(update + error, SIZES)
        error = update + error - decoded
        total, sent = total + update, sent + decoded
    assert torch.equal(sent + error, total)
    assert error.count_nonzero() > 0


def test_a_client_keeps_its_error_and_sends_it_later():
    """One client alone: the server's model moves by what is sent, and the rest of all updates is in its state."""
    people = blobs(1)
    method = channelled(FedAvg(), compression=TopK(share=0.1))
    plan = blueprint(method, people, model=net(batch_norm=False), rounds=1)
    server, _ = simulate(plan, people)
    error = server.fleet.states[0]["channel"]["0"]["error"]
    plain, _ = simulate(blueprint(FedAvg(), people, model=net(batch_norm=False), rounds=1), people)
    whole = torch.cat([value.flatten() for value in plain.state["weights"].values()])
    start = torch.cat([value.flatten() for value in server.ctx.task.initial_weights().values()])
    arrived = torch.cat([value.flatten() for value in server.state["weights"].values()])
    torch.testing.assert_close(arrived - start + error, whole - start)
    assert (arrived != start).sum() == math.ceil(0.1 * len(start))
    changed = arrived != start
    torch.testing.assert_close(error[changed], torch.zeros(int(changed.sum())), atol=1e-7, rtol=0)


@pytest.mark.parametrize(("compression", "keeps"), [(TopK(share=1.0), False), (Qsgd(), False), (Sign(), True)])
def test_only_feedback_that_has_something_to_keep_is_kept(compression, keeps):
    people = blobs()
    server, _ = simulate(blueprint(channelled(FedAvg(), compression=compression), people), people)
    assert all(("channel" in state) == keeps for state in server.fleet.states.values())
    assert "channel" not in server.state


# What counts as sent


def test_bytes_are_those_of_the_encoding_and_of_fields_that_pass():
    people = blobs()
    _, (record, _) = simulate(blueprint(channelled(FedAvg(), compression=TopK(share=0.1)), people), people)
    floats, counters = 263, 8  # of the network, and the bytes of num_batches_tracked
    assert record.bytes_up == {"weights": 4 * (TopK(share=0.1).nbytes([floats]) + counters)}
    assert record.bytes_down == {"weights": 4 * (4 * floats + counters)}
    _, (record, _) = simulate(blueprint(channelled(Scaffold(), compression=Cast()), people), people)
    assert record.bytes_up == {"delta+delta_c+buffers": 4 * (2 * (239 + 239 + 24) + counters)}
    method = FedProto(share_model=True)
    _, (plain, _) = simulate(blueprint(method, people), people)
    _, (record, _) = simulate(blueprint(channelled(method, compression=Cast()), people), people)
    assert record.bytes_up["prototypes"] == plain.bytes_up["prototypes"]
    assert record.bytes_up["weights"] == 4 * (2 * floats + counters)


def test_the_clock_counts_the_encoding():
    people = blobs(4, sizes=(20,))
    clock = Clock(up_mbps=1e-3)
    seconds = []
    for parts in ({}, {"compression": Cast(type="int8", feedback=True)}):
        method = channelled(FedAvg(), **parts) if parts else FedAvg()
        _, (record, _) = simulate(blueprint(method, people, clock=clock), people)
        seconds.append(record.simulated_seconds)
    sizes = [tensor.numel() for tensor in net().state_dict().values() if tensor.is_floating_point()]
    encoded = Cast(type="int8").nbytes(sizes) + 8
    assert seconds == pytest.approx([8e-3 * nbytes(net().state_dict()), 8e-3 * encoded])


# The downlink


def test_clients_download_a_replica_that_the_servers_error_follows():
    people = blobs()
    down = TopK(share=0.2)
    method = channelled(FedAvg(), compression=TopK(share=1.0, down=down))
    plan = blueprint(method, people, model=net(batch_norm=False), rounds=3)
    server, records = simulate(plan, people)
    memory = server.state["channel"]["0"]
    replica = torch.cat([value.flatten() for value in memory["replica"]["weights"].values()])
    model = torch.cat([value.flatten() for value in server.state["weights"].values()])
    received = method.round_exchanges[0].broadcast(server.ctx.at(round=4), server.state)["weights"]
    assert torch.equal(torch.cat([value.flatten() for value in received.values()]), replica)
    assert 0 < (model != replica).sum() < len(model)
    encoded = down.nbytes([215])
    assert [record.bytes_down["weights"] for record in records] == [4 * 4 * 215, 4 * encoded, 4 * encoded]
    assert memory["heard"].tolist() == [3, 3, 3, 3]


def test_clients_fetch_what_they_have_missed_or_the_whole_model_if_that_is_less():
    people = blobs(6, sizes=(20,))
    method = channelled(FedAvg(), compression=Cast(down=TopK(share=0.3)))
    plan = blueprint(method, people, model=net(batch_norm=False), rounds=6, cohort=2, seed=1)
    server, records = simulate(plan, people)
    encoded, whole, heard = TopK(share=0.3).nbytes([215]), 4 * 215, {}
    for record in records:
        cohort = server.sample(record.round)
        missed = [min(whole, (record.round - heard[i]) * encoded) if i in heard else whole for i in cohort]
        assert record.bytes_down["weights"] == sum(missed)
        heard |= dict.fromkeys(cohort, record.round)
    assert len({tuple(record.bytes_down.values()) for record in records}) > 2


def test_a_downlink_that_loses_nothing_changes_nothing():
    people = blobs()
    plain, _ = simulate(blueprint(FedAvg(), people, rounds=3), people)
    method = channelled(FedAvg(), compression=TopK(share=1.0, down=TopK(share=1.0)))
    server, _ = simulate(blueprint(method, people, rounds=3), people)
    for name, value in plain.state["weights"].items():
        assert torch.equal(server.state["weights"][name], value)


@EACH
def test_training_goes_on_with_every_compression(compression: Compression):
    people = blobs()
    server, records = simulate(blueprint(channelled(FedAvg(), compression=compression), people, rounds=4), people)
    assert sum(records[-1].bytes_up.values()) <= sum(records[-1].bytes_down.values())
    assert all(value.isfinite().all() for value in server.state["weights"].values())
    variances = [value for name, value in server.state["weights"].items() if name.endswith("running_var")]
    assert all((value >= 0).all() for value in variances)
