"""src/llama/kv_pages.h: sequences that share a KV cache have pages of it, each with its cells in order."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from draftwood._llama_cpp import llama_cpp as native
from draftwood.engine import _capi

from bench import testing_api
from tests.model.rig import Rig
from tests.model.test_kq_mask import masks, put

PAGE = 64


@pytest.fixture
def rig_of(llama_arch):
    """Return make(**settings) for a rig whose sequences share a cache."""
    made: list[Rig] = []

    def make(*, n_seq_max: int = 3, n_ctx: int = 1024, **settings) -> Rig:
        settings = {"kv_unified": True, "n_ubatch": 512, **settings}
        made.append(Rig(llama_arch, n_ctx=n_ctx, n_seq_max=n_seq_max, **settings))
        return made[-1]

    yield make
    for rig in made:
        rig.close()


def cells(rig: Rig, seq: int) -> list[int]:
    """Return the cells of a sequence, by llama.cpp's mask of a row behind it."""
    n_kv = native.llama_n_ctx(rig.ctx)
    return np.flatnonzero(masks(rig, [seq], [[10**6]], n_kv)[0][0] == 0).tolist()


def put_rows(rig: Rig, rows: list[tuple[int, int]]) -> None:
    """Decode a token for each (sequence, position), in one batch."""
    batch = native.llama_batch_init(len(rows), 0, 1)
    try:
        for i, (seq, position) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = 5 + i % 50, position, 1, 0
            batch.seq_id[i][0] = seq
        batch.n_tokens = len(rows)
        assert native.llama_decode(rig.ctx, batch) == 0
    finally:
        native.llama_batch_free(batch)


def range_of(n: int) -> list[int]:
    return list(range(n))


def pages(*numbers: int, first: int = 0, n: int) -> list[int]:
    """Return n cells of these pages, from the first-th on."""
    return [page * PAGE + i for page in numbers for i in range(PAGE)][first : first + n]


def test_sequences_take_turns(rig_of):
    """Each has the cells that it would have alone, but for the numbers of its pages."""
    rig = rig_of()
    for position in range(70):
        put(rig, [position], seq=2)
        put(rig, [position], seq=0)
    assert cells(rig, 2) == pages(0, 2, n=70)
    assert cells(rig, 0) == pages(1, 3, n=70)
    put(rig, range(200), seq=1)  # a prompt
    assert cells(rig, 1) == pages(4, 5, 6, 7, n=200)


def test_two_prompts_of_one_batch(rig_of):
    rig = rig_of()
    put_rows(rig, [(i % 2, i // 2) for i in range(160)])
    assert cells(rig, 0) == pages(0, 2, n=80)
    assert cells(rig, 1) == pages(1, 3, n=80)


def test_a_decode_of_several_batches(rig_of):
    rig = rig_of(n_ubatch=32, n_batch=512)
    put_rows(rig, [(seq, i) for seq in (1, 0) for i in range(100)])
    assert cells(rig, 1) == pages(0, 1, n=100)
    assert cells(rig, 0) == pages(2, 3, n=100)


def test_a_text_that_ends_leaves_its_pages_to_the_next(rig_of):
    rig = rig_of()
    for seq in range(3):
        put(rig, range(100), seq=seq)
    assert native.llama_memory_seq_rm(rig.memory, 1, -1, -1)
    put(rig, range(130), seq=1)
    assert cells(rig, 1) == pages(2, 3, 6, n=130)
    put(rig, range(100, 130), seq=0)
    assert cells(rig, 0) == pages(0, 1, 7, n=130)  # in ascending order, whatever is free below


def test_rejected_drafts_leave_the_next_page(rig_of):
    rig = rig_of()
    put(rig, range(60))
    put(rig, [0], seq=1)
    put(rig, range(60, 70))
    assert native.llama_memory_seq_rm(rig.memory, 0, 62, -1)
    put(rig, range(1, 65), seq=1)
    put(rig, range(62, 70))
    assert cells(rig, 1) == pages(1, 2, n=65)
    assert cells(rig, 0) == pages(0, 3, n=70)


def test_those_who_share_a_beginning_go_on_apart(rig_of):
    """The first goes on in the page, others at the same place of their own."""
    rig = rig_of()
    put(rig, range(70))
    for seq in (1, 2):
        native.llama_memory_seq_cp(rig.memory, 0, seq, -1, -1)
    for position in range(70, 72):
        for seq in (1, 0, 2):
            put(rig, [position], seq=seq)
    shared = pages(0, 1, n=70)
    assert cells(rig, 1) == [*shared, PAGE + 6, PAGE + 7]
    assert cells(rig, 0) == [*shared, 2 * PAGE + 6, 2 * PAGE + 7]
    assert cells(rig, 2) == [*shared, 3 * PAGE + 6, 3 * PAGE + 7]


def test_two_prompts_behind_a_shared_beginning(rig_of):
    """Rows of one batch: what the first takes of the shared page is not the second's."""
    rig = rig_of()
    put(rig, range(60))
    native.llama_memory_seq_cp(rig.memory, 0, 1, -1, -1)
    put_rows(rig, [(seq, 60 + i) for seq in (0, 1) for i in range(20)])
    assert cells(rig, 0) == pages(0, 1, n=80)
    assert cells(rig, 1) == [*pages(0, n=60), *pages(2, 3, first=60, n=20)]


def test_rows_of_several_sequences(rig_of):
    """All of them go on behind the row."""
    rig = rig_of()
    batch = native.llama_batch_init(10, 0, 2)
    try:
        for i in range(10):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = 5, i, 2, 0
            batch.seq_id[i][0], batch.seq_id[i][1] = 0, 1
        batch.n_tokens = 10
        assert native.llama_decode(rig.ctx, batch) == 0
    finally:
        native.llama_batch_free(batch)
    put_rows(rig, [(1, 10), (0, 10)])
    assert cells(rig, 1) == range_of(11)
    assert cells(rig, 0) == [*range_of(10), PAGE + 10]


def test_a_sequence_without_a_page_behind_it_leaves_the_others_alone(rig_of):
    rig = rig_of(n_ctx=512)
    put(rig, range(250), seq=1)
    put(rig, range(256), seq=0)
    assert cells(rig, 0) == pages(4, 5, 6, 7, n=256)
    assert native.llama_memory_seq_rm(rig.memory, 1, -1, -1)
    put(rig, range(10), seq=2)
    put_rows(rig, [(0, 256), (2, 10), (0, 257)])
    assert cells(rig, 0) == [*pages(1, n=2), *pages(4, 5, 6, 7, n=256)]
    assert cells(rig, 2) == range_of(11)


def test_a_drafter_takes_the_cells_that_its_trees_left(gguf):
    """No text depends on where its cells lie, and holes would make its attention longer."""
    rig = Rig(gguf("planted-moe"), drafter=_capi.DRAFTER_MTP, tree_budget=24, draft_tokens=6, n_ctx=1024,
              n_seq_max=2, kv_unified=True, flash=True)  # fmt: skip
    text = [rig.start()]
    longest = []
    while len(text) < 200:
        rig.engine.propose(text[-1])
        rig.engine.verify()
        while rig.engine.row() is not None:
            text.append(rig.sample()[0])
        rig.engine.commit()
        longest.append(testing_api.end_of_cells(rig.engine, of_drafter=True))
    assert rig.engine.stats().tree_rounds > 10
    assert max(longest) < 300
    rig.close()


def test_a_text_that_begins_behind_the_first_position(rig_of):
    rig = rig_of()
    put(rig, range(100, 130))
    assert cells(rig, 0) == pages(0, 1, first=100 % PAGE, n=30)


@pytest.mark.parametrize("n_ctx", [256, 512])
def test_without_free_pages_free_cells_are_taken(rig_of, n_ctx):
    """No text ends earlier than in llama.cpp."""
    rig = rig_of(n_ctx=n_ctx, n_seq_max=4)
    draw = random.Random(n_ctx)
    lengths = [0, 0, 0, 0]
    for _ in range(n_ctx):
        seq = draw.choice([0, 1, 1, 3])
        put(rig, [lengths[seq]], seq=seq)
        lengths[seq] += 1
    taken = [cells(rig, seq) for seq in range(4)]
    assert [len(each) for each in taken] == lengths
    assert sorted(itertools.chain(*taken)) == list(range(n_ctx))
    assert native.llama_memory_seq_rm(rig.memory, 1, lengths[1] - 5, -1)
    put(rig, range(lengths[0], lengths[0] + 5))
    assert set(cells(rig, 0)) - set(taken[0]) == set(taken[1]) - set(cells(rig, 1))


def test_no_pages_without_an_engine_and_in_caches_of_their_own(rig_of):
    rig = rig_of(engine=False)
    for position in range(4):
        for seq in (0, 1):
            put(rig, [position], seq=seq)
    rig.attach()
    assert cells(rig, 0) == [0, 2, 4, 6]
    streams = rig_of(kv_unified=False, n_seq_max=2)
    for seq in (1, 0):
        put(streams, range(5), seq=seq)
    for seq in (1, 0):
        assert masks(streams, [seq], [[9]], 256)[0][0][:6].tolist() == [0.0] * 5 + [-np.inf]
