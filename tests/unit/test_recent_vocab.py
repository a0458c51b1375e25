"""src/drafters/recent_vocab.h: which tokens drafts are chosen from.

It runs without a model: bench/testing_api.py, draftwood-testing.h.
"""

from __future__ import annotations

from collections import OrderedDict

import pytest
from draftwood.errors import OptionError
from hypothesis import given
from hypothesis import strategies as st

from bench.testing_api import recent_vocab

N = 64


def clock(size: int, text: list[int]) -> tuple[list[int], list[int]]:
    """Do the same in Python: a clock whose hand goes down from the last place."""
    held, used, hand = list(range(size)), [False] * size, size - 1
    places = []
    for token in text:
        if token in held:
            used[held.index(token)] = True
            places.append(-1)
            continue
        while used[hand]:
            used[hand], hand = False, (hand - 1) % size
        held[hand], used[hand] = token, True
        places.append(hand)
        hand = (hand - 1) % size
    return places, held


def test_it_begins_with_the_first_tokens():
    assert recent_vocab(5, N, []) == ([], [0, 1, 2, 3, 4])


def test_a_new_token_takes_the_last_place():
    assert recent_vocab(4, N, [40, 41, 40, 1]) == ([3, 2, -1, -1], [0, 1, 41, 40])


def test_a_token_of_the_text_outlives_one_that_was_never_used():
    places, held = recent_vocab(3, N, [2, 1, 50, 51])
    assert places == [-1, -1, 0, 2]
    assert held == [50, 1, 51]


def test_a_whole_vocabulary_takes_nothing_in():
    places, held = recent_vocab(N, N, list(range(N)))
    assert set(places) == {-1}
    assert held == list(range(N))


def test_one_place():
    assert recent_vocab(1, N, [7, 7, 8]) == ([0, -1, 0], [8])


@given(st.integers(1, N), st.lists(st.integers(0, N - 1), max_size=400))
def test_it_is_a_clock(size, text):
    places, held = recent_vocab(size, N, text)
    assert (places, held) == clock(size, text)
    assert len(set(held)) == size


@given(st.lists(st.integers(0, N - 1), min_size=1, max_size=300))
def test_the_newest_token_is_always_held(text):
    for end in range(1, len(text) + 1):
        assert text[end - 1] in recent_vocab(2, N, text[:end])[1]


def test_it_misses_hardly_more_than_the_least_recently_used():
    """Text with locality: each stretch draws from a few tokens of its own."""
    text = [(29 * (i // 50) + i * i % 11) % N for i in range(4000)]
    lru: OrderedDict[int, None] = OrderedDict.fromkeys(range(16))
    misses = 0
    for token in text:
        misses += token not in lru
        lru[token] = None
        lru.move_to_end(token)
        if len(lru) > 16:
            lru.popitem(last=False)
    taken = sum(place >= 0 for place in recent_vocab(16, N, text)[0])
    assert misses <= taken <= 1.1 * misses


@pytest.mark.parametrize(
    ("size", "text", "said"),
    [
        (0, [1], "a part of 0 tokens; expected 1 to n_vocab, which is 64"),
        (N + 1, [1], "a part of 65 tokens"),
        (4, [N], "tokens[0] is 64; expected 0 to 63"),
        (4, [0, -1], "tokens[1] is -1"),
    ],
)
def test_what_makes_no_sense_is_refused(size, text, said):
    with pytest.raises(OptionError) as caught:
        recent_vocab(size, N, text)
    assert said in caught.value.message
