"""sampling.py: which requests' samplers decide among a row's best tokens only."""

from __future__ import annotations

import numpy as np
import pytest
from draftwood.errors import OptionError
from draftwood.generate.sampling import as_top_k, require_finite, tokens_enough

DEFAULTS = {
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.05,
    "temp": 0.8,
    "repeat_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "mirostat_mode": 0,
    "logits_processor": None,
    "grammar": None,
}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, 40),
        ({"temp": 0.0}, 1),
        ({"temp": 0.0, "top_k": 0}, 1),
        ({"top_k": 100}, 100),
        ({"top_k": 0}, 0),
        ({"top_k": -1}, 0),
        ({"temp": -1.0}, 0),
        ({"mirostat_mode": 2}, 0),
        ({"mirostat_mode": 2, "temp": 0.0}, 1),
        ({"repeat_penalty": 1.1}, 0),
        ({"frequency_penalty": 0.1, "temp": 0.0}, 0),
        ({"presence_penalty": -0.1}, 0),
        ({"grammar": object()}, 0),
        ({"logits_processor": [], "temp": 0.0}, 0),
    ],
)
def test_tokens_enough(change, expected):
    assert tokens_enough(**{**DEFAULTS, **change}) == expected


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), -float("inf"), 1e39, 10**400, "0.8", None], ids=str
)
def test_numbers_that_make_no_sense(value):
    for name in (*("temp", "top_p", "min_p", "typical_p", "tfs_z", "repeat_penalty"), "mirostat_eta"):
        with pytest.raises(OptionError, match="expected a finite number") as caught:
            require_finite({**DEFAULTS, name: value})
        assert str(caught.value).startswith("temperature is" if name == "temp" else f"{name} is")


@pytest.mark.parametrize(
    ("given", "expected"), [(40, 40), (0, 0), (-1, 0), (2**31 - 1, 2**31 - 1), (2**31, 0), (2**32 + 5, 0)]
)
def test_top_k_in_a_c_int(given, expected):
    assert as_top_k(given) == as_top_k(np.int64(given)) == expected


@pytest.mark.parametrize("given", ["3", None, 1.5], ids=str)
def test_top_k_that_is_none(given):
    with pytest.raises(OptionError, match=r"top_k is .*; expected a whole number"):
        as_top_k(given)


def test_numbers_that_do():
    require_finite({**DEFAULTS, "temp": -1.0, "top_p": 1, "min_p": np.float32(0.1), "repeat_penalty": 0})
