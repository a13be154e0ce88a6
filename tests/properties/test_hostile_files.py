"""Files of somebody else, made hostile at random: each is read, or refused in one line, in little time and memory."""

import pytest

from helpers.fuzzing import all_inputs, fuzz
from helpers.hostile_files import READERS

FEW = 6
"""The inputs of a reader; `benchmarks/fuzz.py` tries thousands."""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What came of the inputs, by reader."""
    return dict(fuzz(list(READERS), FEW, tmp_path_factory.mktemp("fuzzed")))


@pytest.mark.parametrize("name", READERS)
def test_each_is_read_or_refused_in_a_line(found, name):
    assert found[name].faults == []
    assert found[name].tried == len(all_inputs([name], FEW))
