"""Bytes of tokens: long ones are kept, ids that are none are refused, upstream's answers are kept else."""

from __future__ import annotations

from pathlib import Path

import pytest
from draftwood import ClosedError, Llama, OptionError
from draftwood._llama_cpp._internals import LlamaModel
from draftwood.api.detokenize import Growing
from hypothesis import given, settings
from hypothesis import strategies as st

TINY = Path(__file__).resolve().parents[2] / "models" / "tiny-moe" / "tiny-moe-f16.gguf"
LONG = {2723: 64, 3584: 77}  # tokens of tiny-moe with more than 32 bytes, all dashes


@pytest.fixture(scope="module")
def llm():
    llm = Llama(str(TINY), vocab_only=True, verbose=False)
    yield llm
    llm.close()


def test_long_tokens_are_kept(llm):
    """Upstream reads each token into 32 bytes and drops what does not fit."""
    for token, size in LONG.items():
        assert llm.detokenize([token]) == b"-" * size
        assert llm.tokenizer().detokenize([5, token]) == llm.detokenize([5]) + b"-" * size
        assert llm.tokenizer().decode([token]) == "-" * size
        assert llm.tokenize(b"-" * size, add_bos=False) == [token]


def test_every_other_token_is_upstreams(llm):
    theirs = LlamaModel.detokenize
    for special in (False, True):
        for token in set(range(llm.n_vocab())) - LONG.keys():
            assert llm.detokenize([token], special=special) == theirs(llm._model, [token], special), token
    assert llm.detokenize([]) == b""


@settings(deadline=None)
@given(st.lists(st.one_of(st.integers(0, 4095), st.sampled_from([0, 1, 2, 11, 220, 262])), max_size=40))
def test_lists_are_upstreams(llm, tokens):
    tokens = [token for token in tokens if token not in LONG]
    expected = LlamaModel.detokenize(llm._model, tokens, False)
    assert llm.detokenize(tokens) == expected
    growing = Growing(llm._pieces)
    for i, token in enumerate(tokens):
        growing.push(token)
        assert bytes(growing.data) == LlamaModel.detokenize(llm._model, tokens[: i + 1], False)


@pytest.mark.parametrize("token", [-1, 4096, 10**6, -(2**31)])
def test_ids_that_are_none(llm, token):
    """Upstream ends the process."""
    with pytest.raises(OptionError, match=f"found token {token}; expected ids from 0 to 4095"):
        llm.detokenize([5, token])


def test_a_tokenizer_outlives_its_model():
    llm = Llama(str(TINY), vocab_only=True, verbose=False)
    tokenizer = llm.tokenizer()
    llm.close()
    with pytest.raises(ClosedError, match="closed"):
        tokenizer.detokenize([5])
