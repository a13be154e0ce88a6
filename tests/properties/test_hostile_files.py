"""Files of somebody else, made hostile at random: each is read, or refused in one line, in little time and memory."""

import pytest

from helpers.fuzzing import READERS, fuzz

FEW, MANY = 25, 2000


@pytest.mark.parametrize("name", READERS)
def test_each_is_read_or_refused_in_a_line(name, tmp_path):
    found = fuzz(name, FEW, tmp_path)
    assert found.faults == []
    assert found.tried == FEW
