"""llama_decode and llama_memory_seq_rm of the package `llama_cpp` on a `Llama` with recurrent layers."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

import draftwood._llama_cpp as package
import numpy as np
import pytest
from draftwood import Llama, OptionError
from draftwood._llama_cpp import llama_cpp as native

from tests.model.texts import STOCK, P, text

TOKENS = [*P, *range(20, 50)]
ENGINES = [
    {"speculation": "mtp"},
    {"speculation": "off"},
    {"speculation": "off", "checkpoint_bytes": 0},
    STOCK,
]


@contextlib.contextmanager
def batch_of(tokens: list[int], start: int, *, all_logits: bool = True) -> Iterator[package.llama_batch]:
    batch = package.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i] = token, start + i
        batch.seq_id[i][0], batch.n_seq_id[i] = 0, 1
        batch.logits[i] = all_logits or i == len(tokens) - 1
    yield batch
    package.llama_batch_free(batch)


def decode(llm, tokens, start, of=package):
    """Decode as guidance does; return the logits of all rows."""
    with batch_of(tokens, start) as batch:
        assert of.llama_decode(llm.ctx, batch) == 0
    rows = native.llama_get_logits(llm.ctx)
    return np.ctypeslib.as_array(rows, shape=(len(tokens), llm.n_vocab())).copy()


def cut(llm, n_keep, of=package, seq_id=-1):
    return of.llama_memory_seq_rm(native.llama_get_memory(llm.ctx), seq_id, n_keep, -1)


def length(llm):
    return native.llama_memory_seq_pos_max(native.llama_get_memory(llm.ctx), 0) + 1


@pytest.mark.parametrize("settings", ENGINES, ids=str)
@pytest.mark.parametrize("seq_id", [-1, 0])
def test_a_cut_in_the_middle_leaves_what_a_fresh_context_has(llama, settings, seq_id):
    llm = llama(**settings)
    decode(llm, TOKENS, 0)
    for n_keep in (len(TOKENS) - 1, 7, 20, 19, 1, 0):
        assert cut(llm, n_keep, seq_id=seq_id) is True
        assert length(llm) == llm.n_tokens == n_keep
        got = decode(llm, TOKENS[n_keep:], n_keep)
        other = llama(**settings)
        if n_keep:
            decode(other, TOKENS[:n_keep], 0)
        expected = decode(other, TOKENS[n_keep:], n_keep)
        if settings is STOCK:  # its rows depend on the batches that the kept tokens came in
            assert np.abs(got - expected).max() < 1e-2
        else:
            assert np.array_equal(got, expected)


def test_nothing_is_behind_the_end(llama):
    llm = llama(speculation="off")
    assert cut(llm, 5)
    assert length(llm) == llm.n_tokens == 0
    decode(llm, TOKENS, 0)
    assert cut(llm, len(TOKENS))
    assert length(llm) == llm.n_tokens == len(TOKENS)


def test_the_library_refuses_that_cut(llama):
    llm = llama(speculation="off")
    decode(llm, TOKENS, 0)
    assert cut(llm, 7, of=native) is False
    assert length(llm) == len(TOKENS)


def test_a_place_that_was_gone_back_to_is_found_again(llama):
    llm = llama(speculation="off")
    decode(llm, TOKENS, 0)
    assert cut(llm, 20)
    evaluated = llm.speculation_stats.prompt_tokens
    for _ in range(3):
        decode(llm, TOKENS[20:], 20)
        assert cut(llm, 20)
    stats = llm.speculation_stats
    assert stats.prompt_tokens - evaluated == 3 * len(TOKENS[20:]), "nothing was evaluated twice"
    assert stats.restored == 3


def test_one_token_after_the_other(llama):
    """The logits of a decode are those of a decode by the library."""
    ours, theirs = llama(speculation="mtp"), llama(speculation="off")
    for start in range(0, len(TOKENS), 9):
        rows = [decode(ours, TOKENS[start : start + 9], start)]
        rows.append(decode(theirs, TOKENS[start : start + 9], start, of=native))
        assert np.array_equal(*rows)


def test_generations_between(llama):
    llm, expected = llama(speculation="mtp"), text(llama(speculation="off"), 30)
    for k in range(1, 6):
        assert text(llm, k) == expected[:k]
        assert cut(llm, len(P) - k)
        decode(llm, TOKENS[:9], len(P) - k)
        assert text(llm, 30) == expected


def test_a_stream_that_is_open(llama):
    llm = llama(speculation="mtp")
    stream = llm.generate(P, temp=0.0)
    got = [next(stream) for _ in range(5)]
    assert cut(llm, llm.n_tokens), "nothing is behind its end"
    got += [next(stream) for _ in range(5)]
    stream.close()
    assert got == text(llama(speculation="off"), 10)


def test_tokens_that_nobody_noted_stay_the_librarys(llama):
    llm = llama(speculation="off")
    decode(llm, TOKENS, 0, of=native)
    assert cut(llm, 7) is False
    assert length(llm) == len(TOKENS)
    assert cut(llm, 0) is True
    assert length(llm) == 0


def test_a_range_in_the_middle_stays_the_librarys(llama):
    llm = llama(speculation="off")
    decode(llm, TOKENS, 0)
    memory = native.llama_get_memory(llm.ctx)
    expected = native.llama_memory_seq_rm(memory, 0, 3, 5)
    assert package.llama_memory_seq_rm(memory, 0, 3, 5) == expected
    assert package.llama_memory_seq_rm(memory, 1, 3, -1) == native.llama_memory_seq_rm(memory, 1, 3, -1)


def test_a_picture_in_what_is_kept(llama):
    llm = llama(speculation="off")
    decode(llm, TOKENS, 0)
    llm.input_ids[3] = -1
    assert cut(llm, 7) is False


def test_batches_of_other_shapes_are_the_librarys(llama):
    llm = llama(speculation="off", n_ubatch=16)
    array = (ctypes.c_int32 * 4)(*TOKENS[:4])
    assert package.llama_decode(llm.ctx, package.llama_batch_get_one(array, 4)) == 0
    assert llm.n_tokens == 4
    decode(llm, TOKENS[4:], 4)  # more than a ubatch
    assert llm.n_tokens == length(llm) == len(TOKENS)
    with batch_of([5, 6], len(TOKENS)) as batch:
        batch.seq_id[1][0] = 1
        package.llama_decode(llm.ctx, batch)
    assert llm.n_tokens == len(TOKENS)


def test_what_cannot_be_decoded(llama):
    llm = llama(speculation="off")
    with pytest.raises(OptionError, match="token"), batch_of([10**6], 0) as batch:
        package.llama_decode(llm.ctx, batch)
    assert llm.n_tokens == length(llm) == 0
    decode(llm, TOKENS, 0)
    n = llm.n_ctx() - len(TOKENS) + 1
    with batch_of([1] * n, len(TOKENS)) as batch:
        assert package.llama_decode(llm.ctx, batch) == 1, "the library's number for a full context"
    assert length(llm) == len(TOKENS)


def test_models_without_recurrent_layers_are_left_alone(llama_arch):
    llm = Llama(llama_arch, n_ctx=256, n_threads=1, verbose=False)
    decode(llm, TOKENS, 0)
    assert llm.n_tokens == 0
    assert cut(llm, 7) is True
    assert length(llm) == 7
    llm.close()


def test_a_closed_one_is_forgotten(llama):
    from draftwood.generate import raw

    llm = llama(speculation="off")
    assert llm in raw._watched.values()
    llm.close()
    assert llm not in raw._watched.values()
