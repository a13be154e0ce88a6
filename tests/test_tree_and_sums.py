"""Sums that do not depend on their order, payloads that come back as they went, and fingerprints that notice."""

import math

import numpy as np
import pytest
import torch

from rayfed.core.optim import SGD
from rayfed.core.trees import (
    add,
    clone,
    named_tensors,
    nbytes,
    only,
    scale,
    stack,
    sub,
    tree_map,
    unstack,
    without,
    zeros_like,
)
from rayfed.engine.exact_sum import ExactSum
from rayfed.engine.serialization import Packed, bytes_by_field, pack, state_hash, unpack

TERMS = 3000


def total(terms):
    result = ExactSum()
    for tree, weight in terms:
        result.add(tree, weight)
    return result


def many_terms(seed=0):
    """Terms of very different sizes with weights that sum to 1."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(TERMS, generator=generator, dtype=torch.float64)
    weights = (weights / weights.sum()).tolist()
    sizes = 10.0 ** (6 * torch.rand(TERMS, generator=generator) - 4)
    trees = [
        {"w": torch.randn(7, generator=generator) * size, "in": [torch.randn((), generator=generator), size.clone()]}
        for size in sizes
    ]
    return list(zip(trees, weights, strict=True))


def test_order_and_grouping_do_not_change_a_bit():
    terms = many_terms()
    whole = total(terms).value
    rng = np.random.default_rng(0)
    for groups in (1, 2, 3, 7, 40):
        order = rng.permutation(TERMS)
        cuts = np.sort(rng.choice(TERMS, groups - 1, replace=False))
        parts = [total([terms[k] for k in some]) for some in np.split(order, cuts)]
        merged = ExactSum()
        for part in [parts[k] for k in rng.permutation(groups)]:
            merged.merge(part)
        assert state_hash(merged.value) == state_hash(whole)


def test_naive_sums_do_depend_on_it():
    # otherwise the test above would prove nothing
    terms = many_terms()
    forth = sum(tree["w"].double() * weight for tree, weight in terms)
    back = sum(tree["w"].double() * weight for tree, weight in reversed(terms))
    assert not torch.equal(forth, back)


def test_the_sum_is_the_sum():
    terms = many_terms()
    result = total(terms)
    for index in range(7):
        exact = math.fsum(tree["w"][index].item() * weight for tree, weight in terms)
        assert result.value["w"][index].item() == pytest.approx(exact, abs=TERMS * 2.0**-41)
    assert result.result()["w"].dtype == torch.float32
    assert isinstance(result.result()["in"], list)


def test_negative_weights_and_types():
    terms = [
        ({"h": torch.tensor([1.5], dtype=dtype)}, w) for dtype, w in ((torch.bfloat16, 2.0), (torch.bfloat16, -1.0))
    ]
    found = total(terms).result()["h"]
    assert found.dtype == torch.bfloat16
    assert found.item() == 1.5
    assert total([({"d": torch.tensor([0.1], dtype=torch.float64)}, 1.0)]).result()["d"].item() == pytest.approx(0.1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_passes(bad):
    found = total([({"w": torch.tensor([1.0, bad])}, 0.5), ({"w": torch.tensor([1.0, 1.0])}, 0.5)]).result()["w"]
    assert found[0].item() == 1.0
    assert math.isnan(found[1].item()) if math.isnan(bad) else found[1].item() == bad


def test_counters_become_their_greatest():
    trees = [{"n": torch.tensor(k), "seen": torch.tensor([k == 3, False])} for k in (2, 9, 3)]
    found = total([(tree, 1 / 3) for tree in trees]).result()
    assert found["n"].item() == 9
    assert found["n"].dtype == torch.int64
    assert found["seen"].tolist() == [True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_adding_leaves_the_terms_alone(dtype):
    trees = [{"w": torch.tensor([1, 2, 3], dtype=dtype)} for _ in range(3)]
    total([(tree, 0.5) for tree in trees])
    for tree in trees:
        assert tree["w"].tolist() == [1, 2, 3]


def test_nothing_added_is_nothing():
    empty = ExactSum()
    empty.merge(ExactSum())
    assert empty.value is None
    empty.merge(total([({"w": torch.tensor([2.0])}, 1.0)]))
    assert empty.result()["w"].tolist() == [2.0]


PAYLOAD = {
    "floats": torch.randn(3, 4),
    "strided": torch.randn(4, 6)[:, ::2],
    "channels_last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "half": torch.randn(5).to(torch.bfloat16),
    "double": torch.randn(2, dtype=torch.float64),
    "flags": torch.tensor([True, False, True]),
    "count": torch.tensor(7),
    "counts": torch.arange(5),
    "bytes": torch.arange(6, dtype=torch.uint8),
    "scalar": torch.tensor(0.5, dtype=torch.bfloat16),
    "nested": {"list": [torch.ones(1), (torch.zeros(2), None)], "text": "kept", "number": 3},
}


def test_pack_and_unpack_give_back_every_bit():
    back = unpack(pack(PAYLOAD), torch.device("cpu"))
    assert state_hash(back) == state_hash(PAYLOAD)
    for (path, sent), (other, found) in zip(named_tensors(PAYLOAD), named_tensors(back), strict=True):
        assert (path, sent.dtype, sent.shape) == (other, found.dtype, found.shape)
        assert torch.equal(sent, found)
    assert back["nested"]["text"] == "kept"
    assert back["nested"]["number"] == 3
    assert back["nested"]["list"][1][1] is None
    assert isinstance(back["nested"]["list"][1], tuple)


def test_tensors_without_elements_come_back():
    back = unpack(pack({"rows": torch.zeros(0, 3)}), torch.device("cpu"))["rows"]
    assert back.shape == (0, 3)
    assert back.dtype == torch.float32


def test_packed_is_plain_bytes_and_unpacked_is_our_own():
    weights = torch.ones(3, requires_grad=True)
    packed = pack({"w": weights})["w"]
    assert isinstance(packed, Packed)
    assert packed.data.dtype == np.uint8
    assert packed.data.nbytes == 12
    packed.data.setflags(write=False)  # as in the object store
    back = unpack({"w": packed}, torch.device("cpu"))["w"]
    back.add_(1)
    assert weights.tolist() == [1, 1, 1]
    assert not back.requires_grad


def test_bytes_are_those_of_the_tensors():
    assert nbytes(PAYLOAD["half"]) == 10
    assert nbytes(PAYLOAD["nested"]) == 12
    sizes = {"flags": PAYLOAD["flags"], "half": PAYLOAD["half"], "count": PAYLOAD["count"], "nothing": torch.zeros(0)}
    assert bytes_by_field(sizes) == {"flags": 3, "half": 10, "count": 8}  # a field without bytes is none


def test_fingerprints_notice_names_types_shapes_and_single_bits():
    tree = {"a": torch.tensor([1.0, 2.0]), "b": {"c": torch.tensor(3)}}
    same = {"b": {"c": torch.tensor(3)}, "a": torch.tensor([1.0, 2.0])}
    assert state_hash(tree) == state_hash(same) == state_hash(clone(tree))
    different = [
        {"a": torch.tensor([1.0, 2.0]), "b": {"d": torch.tensor(3)}},
        {"a": torch.tensor([1.0, 2.0]), "b": {"c": torch.tensor(4)}},
        {"a": torch.tensor([1.0, 2.0]), "b": {"c": torch.tensor(3, dtype=torch.int32)}},
        {"a": torch.tensor([[1.0, 2.0]]), "b": {"c": torch.tensor(3)}},
        {"a": torch.tensor([2.0, 1.0]), "b": {"c": torch.tensor(3)}},
        {"a": torch.nextafter(tree["a"], torch.tensor(9.0)), "b": {"c": torch.tensor(3)}},
        {"a": torch.tensor([1.0, 2.0])},
        {"a": tree["a"].view(torch.int32), "b": {"c": torch.tensor(3)}},
    ]
    assert len({state_hash(other) for other in [tree, *different]}) == 1 + len(different)
    assert state_hash({"z": torch.tensor(0.0)}) != state_hash({"z": torch.tensor(-0.0)})


def test_fingerprints_see_values_and_not_their_layout():
    image = torch.randn(2, 3, 4, 5)
    assert state_hash([image]) == state_hash([image.contiguous(memory_format=torch.channels_last)])


def test_tree_arithmetic_returns_new_trees():
    a = {"x": torch.tensor([1.0, 2.0]), "y": [torch.tensor(3.0)]}
    b = {"x": torch.tensor([10.0, 20.0]), "y": [torch.tensor(30.0)]}
    before = state_hash([a, b])
    assert add(a, b, alpha=0.5)["x"].tolist() == [6, 12]
    assert sub(b, a)["y"][0].item() == 27
    assert scale(a, 2)["x"].tolist() == [2, 4]
    assert zeros_like(a)["y"][0].item() == 0
    copied = clone(a)
    copied["x"].add_(1)
    assert tree_map(torch.neg, a)["x"].tolist() == [-1, -2]
    assert state_hash([a, b]) == before


def test_stack_and_unstack_are_inverse_and_the_parts_are_their_own():
    trees = [{"w": torch.full((2,), float(k)), "n": torch.tensor(k), "none": {}} for k in range(3)]
    stacked = stack(trees)
    assert stacked["w"].shape == (3, 2)
    assert stacked["n"].tolist() == [0, 1, 2]
    parts = unstack(stacked, 3)
    assert state_hash(parts) == state_hash(trees)
    parts[0]["w"].fill_(9)
    assert stacked["w"][0].tolist() == [0, 0]


def test_only_and_without_divide_in_the_order_of_the_weights():
    weights = {name: torch.tensor(0.0) for name in "dbca"}
    assert list(only(weights, {"a", "b", "z"})) == ["b", "a"]
    assert list(without(weights, {"a", "b", "z"})) == ["d", "c"]


def test_trees_keep_named_tuples_and_plain_values():
    tree = {"packed": Packed(np.zeros(1), torch.float32, (1,)), "optimizer": SGD(lr=0.1), "n": 3, "w": torch.ones(1)}
    mapped = tree_map(lambda x: x + 1, tree)
    assert isinstance(mapped["packed"], Packed)
    assert mapped["optimizer"] is tree["optimizer"]
    assert mapped["n"] == 3
    assert [path for path, _ in named_tensors({"a": [torch.ones(1), {"b": torch.ones(1)}]})] == ["a.0", "a.1.b"]
