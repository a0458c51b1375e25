"""sampling.py: which requests' samplers decide among a row's best tokens only."""

from __future__ import annotations

import pytest
from draftwood.generate.sampling import tokens_enough

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
