"""src/llama/kq_mask.h, memory.h: masks and cells by position are those that llama.cpp finds one by one."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from draftwood._llama_cpp import llama_cpp as native
from draftwood.engine import _capi
from draftwood.engine.status import check as check_status
from draftwood.errors import OptionError

from bench import testing_api  # noqa: F401 - it gives the functions their types
from tests.model.rig import PROMPT, Rig

N_KV = 64
UNTOUCHED = 7.0


@pytest.fixture
def rig_of(llama_arch, gguf):
    """Return make(**of the context) for a rig; positions of the hybrid model have three dimensions."""
    made: list[Rig] = []

    def make(*, hybrid: bool = False, n_ctx: int = 128, **of_context) -> Rig:
        path = gguf("moe-plain") if hybrid else llama_arch
        made.append(Rig(path, n_ctx=n_ctx, n_ubatch=32, n_batch=512, flash=True, **of_context))
        return made[-1]

    yield make
    for rig in made:
        rig.close()


def put(rig: Rig, positions, seq: int = 0) -> None:
    """Decode a token at each position."""
    batch = native.llama_batch_init(len(positions), 0, 1)
    try:
        for i, position in enumerate(positions):
            batch.token[i], batch.pos[i] = PROMPT[i % len(PROMPT)], position
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, seq, 0
        batch.n_tokens = len(positions)
        assert native.llama_decode(rig.ctx, batch) == 0
    finally:
        native.llama_batch_free(batch)


def masks(rig: Rig, seqs, positions, n_kv=N_KV, *, n_streams=1, causal=True, f16=False):
    """Return masks f32[rows, n_kv], llama.cpp's and ours, and whether ours was filled.

    positions: [n_pos][rows].
    """
    n_rows, flat = len(seqs), [each for dimension in positions for each in dimension]
    found = [np.zeros((n_rows, n_kv), np.float32) for _ in range(2)]
    pointers = [each.ctypes.data_as(ctypes.POINTER(ctypes.c_float)) for each in found]
    filled = ctypes.c_bool()
    check_status(
        _capi.lib.dw_kq_masks(
            *(rig.engine._handle, n_rows, n_streams, len(positions), causal, f16),
            *((ctypes.c_int32 * n_rows)(*seqs), (ctypes.c_int32 * len(flat))(*flat), n_kv, *pointers, filled),
        )
    )
    return *found, filled.value


def check(rig: Rig, rows, is_filled: bool, *, n_pos: int = 4, **of_mask) -> np.ndarray:
    """Compare both masks of rows [(sequence, position)]; return ours."""
    for f16 in (False, True):
        theirs, ours, filled = masks(
            rig, [s for s, _ in rows], [[p for _, p in rows]] * n_pos, f16=f16, **of_mask
        )
        assert filled == is_filled
        if filled:
            assert np.array_equal(ours, theirs)
            assert set(np.unique(ours)) <= {0.0, -np.inf}
        else:
            assert (ours == UNTOUCHED).all()
    return ours


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("n_pos", [1, 4])
def test_rows_behind_a_text(rig_of, hybrid, n_pos):
    rig = rig_of(hybrid=hybrid)
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
    assert (check(rig, [(0, 6)], True) == 0).sum() == 7  # three cells are empty
    put(rig, range(7, 10))
    assert (check(rig, [(0, 7), (0, 8), (0, 9)], True) == 0).sum() == 8 + 9 + 10


def test_a_position_that_several_cells_have(rig_of):
    rig = rig_of()
    put(rig, range(12))
    native.llama_memory_seq_add(rig.memory, 0, 10, 12, -2)  # as two rows of a tree
    assert (check(rig, [(0, 8), (0, 9)], True) == 0).sum() == 10 + 12


@pytest.mark.parametrize(
    ("y", "x", "n_seen"), [(-1, -1, 9), (-1, 3, 9), (3, -1, 10), (0, 0, 10), (0, -1, 9), (3, 3, 10)]
)
def test_a_row_sees_what_is_before_it_in_two_dimensions(rig_of, y, x, n_seen):
    """Of cells at its own position, as of an image. The cell there is at 0, 0."""
    rig = rig_of()
    put(rig, range(10))
    theirs, ours, filled = masks(rig, [0], [[9], [y], [x], [0]])
    assert filled
    assert np.array_equal(ours, theirs)
    assert (ours == 0).sum() == n_seen


def test_rows_of_one_position_and_several_places(rig_of):
    rig = rig_of()
    put(rig, range(10))
    theirs, ours, filled = masks(rig, [0, 0, 0], [[9, 9, 8], [3, -1, 3], [3, -1, 3], [0, 0, 0]])
    assert filled
    assert np.array_equal(ours, theirs)
    assert [(row == 0).sum() for row in ours] == [10, 9, 9]


def test_cells_between_others_are_empty(rig_of):
    rig = rig_of(n_seq_max=2, kv_unified=True, engine=False)  # an engine would give each its pages
    put(rig, range(8))
    put(rig, range(3), seq=1)
    put(rig, range(8, 12))
    rig.attach()
    assert native.llama_memory_seq_rm(rig.memory, 1, -1, -1)
    ours = check(rig, [(0, 11), (0, 9)], True)
    assert (ours[0, 8:11] == -np.inf).all()
    assert [(row == 0).sum() for row in ours] == [12, 10]


def test_each_sequence_sees_its_own_cells(rig_of):
    rig = rig_of(n_seq_max=3, kv_unified=True, engine=False)
    put(rig, range(8))
    put(rig, range(3), seq=1)
    put(rig, range(8, 10))
    put(rig, range(3, 9), seq=1)
    rig.attach()
    rows = [(1, 5), (0, 9), (2, 0), (1, 8), (0, 3), (1, 0), (2, 7), (0, 12)]
    ours = check(rig, rows, True)
    assert [(row == 0).sum() for row in ours] == [6, 10, 0, 9, 4, 1, 0, 10]
    check(rig, rows, True, causal=False)
    assert native.llama_memory_seq_rm(rig.memory, 1, -1, -1)
    check(rig, rows, True)


def test_a_cell_of_two_sequences_is_one_of_each(rig_of):
    rig = rig_of(n_seq_max=2, kv_unified=True)
    put(rig, range(8))
    native.llama_memory_seq_cp(rig.memory, 0, 1, -1, -1)
    check(rig, [(0, 7), (1, 7), (1, 3)], True)
    put(rig, [8], seq=1)
    ours = check(rig, [(0, 8), (1, 8)], True)
    assert [(row == 0).sum() for row in ours] == [8, 9]


def test_rows_that_see_what_follows(rig_of):
    """As those of a block of drafts: each sees all cells, however many lie behind it."""
    rig = rig_of(n_seq_max=2, kv_unified=False)
    put(rig, range(20))
    put(rig, range(5), seq=1)
    ours = check(rig, [(0, 3), (0, 19)], True, causal=False)
    assert [(row == 0).sum() for row in ours] == [20, 20]
    ours = check(rig, [(1, 3), (0, 19)], True, causal=False, n_streams=2)
    assert [(row == 0).sum() for row in ours] == [5, 20]


def test_each_stream_has_its_cells(rig_of):
    rig = rig_of(n_seq_max=2, kv_unified=False)
    put(rig, range(8))
    check(rig, [(0, 6), (0, 7), (1, 3), (1, 4)], True, n_streams=2)  # the second has none
    put(rig, range(5), seq=1)
    check(rig, [(0, 6), (0, 7), (1, 3), (1, 4)], True, n_streams=2)
    assert native.llama_memory_seq_rm(rig.memory, 1, 1, 3)
    check(rig, [(0, 6), (0, 7), (1, 3), (1, 4)], True, n_streams=2)


def test_what_is_longer_than_a_mask_is_left_to_llama_cpp(rig_of):
    rig = rig_of()
    put(rig, range(20))
    check(rig, [(0, 19)], True, n_kv=20)
    check(rig, [(0, 19)], False, n_kv=19)


def test_many_cells_behind_a_row_are_left_to_llama_cpp(rig_of):
    rig = rig_of(n_ctx=512)
    put(rig, range(300))
    check(rig, [(0, 44)], True, n_kv=320)
    check(rig, [(0, 43)], False, n_kv=320)
    check(rig, [(0, 43)], True, n_kv=320, causal=False)


@pytest.mark.parametrize("hybrid", [False, True])
def test_decodes_take_it_while_an_engine_is_attached(rig_of, hybrid):
    rig = rig_of(hybrid=hybrid, exact_rows=0)

    def logits(n_filled: int) -> np.ndarray:
        native.llama_memory_clear(rig.memory, True)
        before = _capi.lib.dw_n_filled_masks()
        put(rig, range(20))
        put(rig, [20])
        assert _capi.lib.dw_n_filled_masks() - before == n_filled
        assert rig.raw_decode(PROMPT[:3]) == 0
        return rig.logits()

    attached = logits(2)
    rig.detach()
    assert np.array_equal(logits(0), attached)
    rig.attach()
    assert np.array_equal(logits(2), attached)


@pytest.mark.parametrize("pos", [-1, 0, 5, 9, 10, 30])
@pytest.mark.parametrize("shared", [False, True])
def test_cells_are_removed_as_llama_cpp_does(rig_of, pos, shared):
    """What is decoded then lies in the same cells, which the masks of both sequences tell."""
    layouts = []
    for ours in (False, True):
        rig = rig_of(n_seq_max=2, kv_unified=True)
        put(rig, range(10))
        if shared:
            native.llama_memory_seq_cp(rig.memory, 0, 1, 2, 7)
        put(rig, range(10, 14))
        native.llama_memory_seq_add(rig.memory, 0, 12, 14, -2)  # two positions that two cells have
        if ours:
            check_status(_capi.lib.dw_remove_from(rig.engine._handle, 0, pos))
        else:
            assert native.llama_memory_seq_rm(rig.memory, 0, pos, -1)
        end = native.llama_memory_seq_pos_max(rig.memory, 0) + 1
        assert end == min(max(pos, 0), 12)
        put(rig, [end, end + 1])
        put(rig, [end + 2])
        rows = [(0, end + i) for i in range(3)] + [(1, 40)]
        layouts.append(masks(rig, [s for s, _ in rows], [[p for _, p in rows]])[0])
    assert np.array_equal(*layouts)


@pytest.mark.parametrize(
    ("seqs", "n_kv", "n_streams"),
    [
        ([-1], 8, 1),
        ([2], 8, 1),
        ([0, 300], 8, 1),
        ([0], 10**6, 1),
        ([0], 0, 1),
        ([0, 0, 0], 8, 2),
        ([0], 8, 0),
    ],
)
def test_rows_and_cells_that_a_cache_does_not_have_are_refused(rig_of, seqs, n_kv, n_streams):
    rig = rig_of(n_seq_max=2)
    rows = (ctypes.c_int32 * len(seqs))(*seqs)
    nothing = (ctypes.c_float * 1)()
    with pytest.raises(OptionError, match="expected"):
        check_status(
            _capi.lib.dw_kq_masks(
                *(rig.engine._handle, len(seqs), n_streams, 1, True, False, rows, rows, n_kv),
                *(nothing, nothing, ctypes.c_bool()),
            )
        )
    if len(seqs) == 1 and seqs[0] != 0:
        with pytest.raises(OptionError, match="expected 0 to 1"):
            check_status(_capi.lib.dw_remove_from(rig.engine._handle, seqs[0], 0))
