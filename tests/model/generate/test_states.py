"""States and caches of a generation under way: saved between tokens and inside a callback, loaded, reused."""

from __future__ import annotations

import itertools

import pytest
from draftwood._llama_cpp.llama_cache import LlamaRAMCache

from tests.model.texts import P, fresh, text


def test_state_saved_within_a_processor(on, off):
    """n_tokens and the memory agree inside a callback too: a checkpoint taken there is worth something."""
    expected = text(off, 30)
    for at in range(1, 10):
        states = []

        def processor(ids, scores, states=states, at=at):
            if len(ids) == len(P) + at:
                states.append(on.save_state())
            return scores

        on.reset()
        assert text(on, 30, logits_processor=[processor]) == expected
        on.reset()
        on.load_state(states[0])
        assert on.n_tokens == len(P) + at
        assert text(on, 30 - at, [*P, *expected[:at]]) == expected[at:]


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 6, 7, 20])
def test_state_saved_and_loaded(on, off, k, llama):
    expected = text(off, 40)
    generator = on.generate(P, temp=0.0)
    got = list(itertools.islice(generator, k))
    state = on.save_state()
    assert state.n_tokens == len(P) + k - 1
    got += itertools.islice(generator, 40 - k)
    generator.close()
    assert got == expected, "saving in the middle changes nothing"
    on.load_state(state)
    assert on.n_tokens == len(P) + k - 1
    assert text(on, 40 - k, [*P, *expected[:k]]) == expected[k:]
    for other in (llama(speculation="off"), llama(speculation="mtp")):
        other.load_state(state)
        assert text(other, 40 - k, [*P, *expected[:k]]) == expected[k:]
        other.load_state(state)
        assert text(other, 20, P) == expected[:20]


def test_state_loaded_in_mid_generation(on, off):
    """The generator that was running goes on from the loaded state, as upstream's does."""
    seen = []
    for llm in (on, off):
        text(llm, 10)
        state = llm.save_state()
        generator = llm.generate([9, 8, 7], temp=0.0)
        got = list(itertools.islice(generator, 4))
        llm.load_state(state)
        got += itertools.islice(generator, 10)
        generator.close()
        seen.append((got, llm.n_tokens))
    assert seen[0] == seen[1]
    assert text(on, 30) == fresh(off, 30)


def test_cache(on, off):
    for llm in (on, off):
        llm.set_cache(LlamaRAMCache())
    for prompt in ("one two", "one two three", "one", "one two", "other"):
        a, b = (llm.create_completion(prompt, max_tokens=12, temperature=0.0) for llm in (on, off))
        assert a["choices"] == b["choices"]
