"""Values of any type as Python's own."""

import numpy as np
import pytest
from draftwood.coerce import as_bool, as_int


@pytest.mark.parametrize("value", [4, np.int64(4), np.uint8(4), np.array(4)], ids=repr)
def test_whole_numbers(value):
    assert as_int(value) == 4
    assert type(as_int(value)) is int


@pytest.mark.parametrize(
    "value", [True, np.bool_(True), 4.0, np.float64(4), "4", None, [4], np.array([4, 4])]
)
def test_what_is_no_whole_number(value):
    assert as_int(value) is None


@pytest.mark.parametrize("value", [True, np.bool_(True), 1, np.int64(1)], ids=repr)
def test_bools(value):
    assert as_bool(value) is True
    assert as_bool(type(value)(0)) is False


@pytest.mark.parametrize("value", ["auto", "", 2, -1, None, [], {}, np.array([1, 0])], ids=repr)
def test_what_is_no_bool(value):
    assert as_bool(value) is None
