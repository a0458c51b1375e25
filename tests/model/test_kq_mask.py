"""src/llama/kq_mask.h: the mask from positions is llama.cpp's, which looks at each cell, or is left to it."""

from __future__ import annotations

import numpy as np
import pytest
from draftwood._llama_cpp import llama_cpp as native

from bench.testing_api import kq_masks
from tests.model.rig import PROMPT, Rig

N_KV = 64


@pytest.fixture
def rig_of(llama_arch):
    """Return make(**of the context) for a rig on a hybrid model, whose positions have three dimensions."""
    made: list[Rig] = []

    def make(**of_context) -> Rig:
        made.append(Rig(llama_arch, n_ctx=128, n_ubatch=32, flash=True, **of_context))
        return made[-1]

    yield make
    for rig in made:
        rig.close()


def put(rig: Rig, positions, seq: int = 0) -> None:
    """Decode a token at each position, which need not follow what is there."""
    batch = native.llama_batch_init(len(positions), 0, 1)
    try:
        for i, position in enumerate(positions):
            batch.token[i], batch.pos[i] = PROMPT[i % len(PROMPT)], position
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, seq, 0
        batch.n_tokens = len(positions)
        assert native.llama_decode(rig.ctx, batch) == 0
    finally:
        native.llama_batch_free(batch)


def check(
    rig: Rig, rows, is_filled: bool, *, n_pos: int = 4, n_streams: int = 1, n_kv: int = N_KV
) -> np.ndarray:
    """Compare both masks of rows [(sequence, position)]; return ours."""
    seqs, positions = [s for s, _ in rows], [p for _, p in rows]
    theirs, ours, filled = kq_masks(rig.engine, seqs, [positions] * n_pos, n_kv, n_streams=n_streams)
    assert filled == is_filled
    if filled:
        assert np.array_equal(ours, theirs)
        assert set(np.unique(ours)) <= {0.0, -np.inf}
    else:
        assert (ours == 7.0).all()  # left alone
    return ours


@pytest.mark.parametrize("n_pos", [1, 4])
def test_rows_behind_a_text(rig_of, n_pos):
    rig = rig_of()
    put(rig, range(20))
    last = check(rig, [(0, 19)], True, n_pos=n_pos)
    assert (last[0] == 0).sum() == 20
    for first in (0, 3, 12, 17, 19, 20, 40):  # as many cells lie behind a row
        ours = check(rig, [(0, first + i) for i in range(6)], True, n_pos=n_pos)
        assert [(row == 0).sum() for row in ours] == [min(20, first + i + 1) for i in range(6)]
    check(rig, [(0, 14), (0, 12), (0, 19), (0, 12)], True, n_pos=n_pos)  # a tree's: in any order, and twice


def test_cells_need_not_lie_in_the_order_of_positions(rig_of):
    """As behind a shift of the context: what follows goes into the cells that it left."""
    rig = rig_of()
    put(rig, range(10))
    assert native.llama_memory_seq_rm(rig.memory, 0, 3, 6)
    native.llama_memory_seq_add(rig.memory, 0, 6, 10, -3)
    check(rig, [(0, 6)], False)  # three cells are empty
    put(rig, range(7, 10))
    assert (check(rig, [(0, 7), (0, 8), (0, 9)], True) == 0).sum() == 8 + 9 + 10


def test_a_position_that_several_cells_have(rig_of):
    rig = rig_of()
    put(rig, range(12))
    native.llama_memory_seq_add(rig.memory, 0, 10, 12, -2)  # as two rows of a tree
    assert (check(rig, [(0, 8), (0, 9)], True) == 0).sum() == 10 + 12


def test_a_row_sees_what_is_beside_it_in_two_dimensions(rig_of):
    """Of cells at its own position those at its place or before it, as of an image. Cells are at 0, 0."""
    rig = rig_of()
    put(rig, range(10))
    for place, n_seen in ((-1, 9), (0, 10), (3, 10)):
        theirs, ours, filled = kq_masks(rig.engine, [0], [[9], [place], [place], [0]], N_KV)
        assert filled
        assert np.array_equal(ours, theirs)
        assert (ours == 0).sum() == n_seen


def test_holes_are_left_to_llama_cpp(rig_of):
    rig = rig_of(n_seq_max=2, kv_unified=True)
    put(rig, range(8))
    put(rig, range(3), seq=1)
    put(rig, range(8, 12))
    assert native.llama_memory_seq_rm(rig.memory, 1, -1, -1)
    check(rig, [(0, 11)], False)


def test_cells_of_another_sequence_are_left_to_llama_cpp(rig_of):
    rig = rig_of(n_seq_max=2, kv_unified=True)
    put(rig, range(8))
    put(rig, range(3), seq=1)
    check(rig, [(0, 7)], False)
    check(rig, [(0, 7), (1, 2)], False)
    assert native.llama_memory_seq_rm(rig.memory, 1, -1, -1)
    check(rig, [(0, 7)], True)  # nothing lies behind its cells


def test_a_cell_of_two_sequences_is_one_of_each(rig_of):
    rig = rig_of(n_seq_max=2, kv_unified=True)
    put(rig, range(8))
    native.llama_memory_seq_cp(rig.memory, 0, 1, -1, -1)
    check(rig, [(0, 7)], True)
    check(rig, [(1, 7)], True)
    put(rig, [8], seq=1)
    check(rig, [(0, 8)], False)
    check(rig, [(1, 8)], True)


def test_each_stream_has_its_cells(rig_of):
    rig = rig_of(n_seq_max=2, kv_unified=False)
    put(rig, range(8))
    put(rig, range(5), seq=1)
    check(rig, [(0, 6), (0, 7), (1, 3), (1, 4)], True, n_streams=2)


def test_what_does_not_fit_or_is_far_from_the_end_is_left_to_llama_cpp(rig_of):
    rig = rig_of()
    put(rig, range(20))
    check(rig, [(0, 19)], True, n_kv=20)
    theirs = kq_masks(rig.engine, [0], [[19]] * 4, 32)[0]
    assert (theirs[0, 20:] == -np.inf).all()


def test_a_decode_takes_it(rig_of):
    """An attached context's logits are those of one that looks at each cell."""
    rig = rig_of()
    put(rig, range(20))
    rig.raw_decode(PROMPT[:3])
    attached = rig.logits()
    rig.detach()
    native.llama_memory_clear(rig.memory, True)
    put(rig, range(20))
    rig.raw_decode(PROMPT[:3])
    assert np.allclose(rig.logits(), attached, atol=2e-3)  # kernels differ
