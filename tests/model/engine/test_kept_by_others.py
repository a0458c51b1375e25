"""A caller that keeps states by itself can keep the drafter's part: dw_restore, dw_drafter_memory."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
from draftwood._llama_cpp import llama_cpp as native
from draftwood.engine import _capi
from draftwood.engine.engine import Engine

from tests.model.engine.calls import MTP, error_of, lib
from tests.model.rig import Rig

MODELS = Path(__file__).resolve().parents[3] / "models" / "tiny-moe"
STORY = "Once upon a time there was a little girl who lived in a house. " * 8
PARTIAL = 1  # LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY


@pytest.fixture
def trained() -> Any:
    """A model whose drafts are often right, with three sequences."""
    rig = Rig(
        MODELS / "tiny-moe-f16.gguf",
        **{
            "drafter": MTP,
            "draft_tokens": 4,
            "n_ctx": 1536,
            "n_seq_max": 3,
            "n_ubatch": 256,
            "exact_rows": 1 << 20,
        },
    )
    yield rig
    rig.close()


def tokens_of(r: Rig, text: str) -> list[int]:
    array = (ctypes.c_int32 * 1024)()
    vocab, data = native.llama_model_get_vocab(r.model), text.encode()
    return list(array[: native.llama_tokenize(vocab, data, len(data), array, 1024, True, False)])


def tell(r: Rig, engine: Engine, prompt: list[int], n_past: int, n: int = 50) -> tuple[list[int], int]:
    """Evaluate a prompt and go on for n tokens; return them, and how many were accepted drafts."""
    engine.stats_reset()
    engine.eval(prompt, n_past)
    told = [engine.next(r.sampler)]
    while len(told) < n:
        engine.propose(told[-1])
        engine.verify()
        while engine.row() is not None:
            told.append(engine.next(r.sampler))
        engine.commit()
    return told, engine.stats().accepted


def drafter_memory(engine: Engine) -> Any:
    memory = ctypes.c_void_p()
    assert lib.dw_drafter_memory(engine._handle, ctypes.byref(memory)) == _capi.OK
    return memory.value


def saved(ctx: Any, seq: int, flags: int = 0) -> Any:
    size = native.llama_state_seq_get_size_ext(ctx, seq, flags)
    state = (ctypes.c_uint8 * size)()
    assert native.llama_state_seq_get_data_ext(ctx, state, size, seq, flags) == size
    return state


def loaded(ctx: Any, seq: int, state: Any) -> None:
    assert native.llama_state_seq_set_data(ctx, state, len(state), seq) == len(state)


def test_a_sequence_loaded_with_the_drafters_part_drafts_as_before(trained: Rig) -> None:
    first = trained.engine
    tell(trained, first, tokens_of(trained, STORY), 0)
    n_past, memory = first.n_past, drafter_memory(first)
    states = saved(trained.ctx, 0), saved(memory, 0)
    turn = tokens_of(trained, " The next day she")
    told, accepted = tell(trained, first, turn, n_past)
    results = {}
    for seq, part in ((1, True), (2, False)):
        other = Engine(trained.ctx, trained.params, **trained.settings, seq_id=seq)
        assert drafter_memory(other) == memory
        loaded(trained.ctx, seq, states[0])
        if part:
            loaded(memory, seq, states[1])
        results[part] = tell(trained, other, turn, n_past)
        other.close()
    assert [text for text, _ in results.values()] == [told, told]
    # one pair at the seam is lost
    assert abs(results[True][1] - accepted) <= 2
    assert results[False][1] < accepted - 5


def test_a_copied_sequence_drafts_with_what_is_copied(trained: Rig) -> None:
    first, other = trained.engine, Engine(trained.ctx, trained.params, **trained.settings, seq_id=1)
    tell(trained, other, tokens_of(trained, "1 2 3 4 5 6 7"), 0)  # a text before
    tell(trained, first, tokens_of(trained, STORY), 0)
    n_past, memory = first.n_past, drafter_memory(first)
    other.reset()
    for each in (trained.ctx, memory):
        native.llama_memory_seq_cp(native.llama_get_memory(each), 0, 1, -1, -1)
    turn = tokens_of(trained, " The next day she")
    told, accepted = tell(trained, first, turn, n_past)
    copied = tell(trained, other, turn, n_past)
    assert copied[0] == told
    assert abs(copied[1] - accepted) <= 2
    other.close()


def test_a_restored_state_leaves_the_drafter_its_part(trained: Rig) -> None:
    engine, story = trained.engine, tokens_of(trained, STORY)
    engine.eval(story, 0)
    state = saved(trained.ctx, 0, PARTIAL)
    told = tell(trained, engine, story[:3], len(story))
    assert lib.dw_restore(engine._handle, state, len(state), len(story)) == _capi.OK
    assert engine.n_past == len(story)
    assert tell(trained, engine, story[:3], len(story)) == told
    engine.trim(0)
    assert tell(trained, engine, story + story[:3], 0)[0] == told[0]


def test_what_restore_refuses(trained: Rig) -> None:
    engine, story = trained.engine, tokens_of(trained, STORY)
    engine.eval(story, 0)
    state = saved(trained.ctx, 0, PARTIAL)
    assert "0 positions to restore" in error_of(
        lib.dw_restore(engine._handle, state, len(state), 0), _capi.ERR_ARGUMENT
    )
    assert engine.n_past == len(story)
    words = error_of(lib.dw_restore(engine._handle, state, len(state) // 2, 5), _capi.ERR_DECODE)
    assert "could not be put back" in words
    engine.reset()
    assert tell(trained, engine, story, 0)[0]
