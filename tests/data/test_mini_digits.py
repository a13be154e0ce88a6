"""The embedded digits: disjoint originals, balanced, and what each domain looks like."""

import numpy as np
import pytest
from PIL import Image

from rayfed.core.errors import UsageError
from rayfed.data.dataset import Dataset
from rayfed.data.partitions.summary import save_contact_sheet
from rayfed.data.sets.mini_digits import DOMAINS, MiniDigits


def test_form_and_balance():
    dataset = MiniDigits().load()
    assert dataset.images.shape == (5 * 449, 3, 28, 28)
    assert dataset.images.dtype == np.uint8
    assert dataset.mean == dataset.std == (0.5, 0.5, 0.5)
    assert dataset.domains == DOMAINS
    for domain in range(5):
        own = dataset.domain == domain
        assert np.ptp(np.bincount(dataset.labels[own], minlength=10)) <= 3
        assert dataset.is_test[own].sum() == 89


def test_no_handwritten_digit_is_in_two_domains():
    dataset = MiniDigits().load()
    handwritten = dataset.source == dataset.sources.index("digits")
    assert handwritten.sum() == 4 * 449
    assert len(np.unique(dataset.index[handwritten])) == 4 * 449
    assert (dataset.domain[~handwritten] == DOMAINS.index("font")).all()


def test_labels_are_those_of_the_originals():
    from sklearn.datasets import load_digits

    dataset = MiniDigits().load()
    handwritten = dataset.source == 0
    np.testing.assert_array_equal(load_digits().target[dataset.index[handwritten]], dataset.labels[handwritten])


def test_a_subset_holds_the_same_pixels():
    whole = MiniDigits().load()
    part = MiniDigits(domains=["street", "plain"], per_domain=50).load()
    assert part.domains == ("street", "plain")
    np.testing.assert_array_equal(part.images[:50], whole.images[whole.domain == 3][:50])
    np.testing.assert_array_equal(part.images[50:], whole.images[:50])
    assert part.is_test.sum() == 20


def test_contact_sheet(tmp_path):
    save_contact_sheet(MiniDigits(per_domain=20).load(), tmp_path / "new" / "sheet.png", columns=10)
    with Image.open(tmp_path / "new" / "sheet.png") as image:
        assert image.format == "PNG"
        assert image.height == 5 * (2 * 28 + 2) + 2
    with pytest.raises(UsageError, match=r"expected uint8 \[N, 1 or 3, height, width\]"):
        save_contact_sheet(Dataset.of("flat", np.zeros((2, 4)), np.zeros(2)), tmp_path / "flat.png")
