"""DFlash blocks of several sequences made together: drafts as alone, and texts as by plain decode.

Contract: dw_propose_all in src/include/draftwood.h, src/drafters/dflash_joint.cpp. The model was trained.
"""

from __future__ import annotations

import ctypes
import random
from pathlib import Path
from typing import Any

import pytest
from draftwood._llama_cpp import llama_cpp as native
from draftwood.engine import _capi
from draftwood.engine.engine import Engine

from bench.testing_api import propose_all
from tests.model.engine.calls import error_of, lib
from tests.model.engine.test_joint_drafts import any_of, check_counts, propose_each, written
from tests.model.engine.test_sequences import Text, close, texts
from tests.model.rig import Rig
from tests.model.test_dflash import with_windows

pytestmark = pytest.mark.parametrize("rig", ["tree"], indirect=True)

MODELS = Path(__file__).resolve().parents[3] / "models" / "tiny-moe"
TARGET, DRAFTER = str(MODELS / "tiny-moe-f16.gguf"), str(MODELS / "dflash-f16.gguf")
BEGINNINGS = (
    "def read_lines(path):\n    with open(path) as file:\n        return file.readlines()\n\n\ndef ",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n        ",
    '{"name": "Ada", "age": 36, "languages": ["',
    "import os\n\n\ndef main():\n    for name in os.listdir('.'):\n        ",
)
SIZES: dict[str, Any] = {"n_seq_max": 4, "n_ctx": 1024, "draft_tokens": 7, "engine": False}
DFLASH = {"drafter": _capi.DRAFTER_DFLASH, "drafter_path": DRAFTER}


def tokens_of(r: Rig, text: str) -> tuple[int, ...]:
    vocab, data = native.llama_model_get_vocab(r.model), text.encode()
    found = (ctypes.c_int32 * len(data))()
    n = native.llama_tokenize(vocab, data, len(data), found, len(data), False, False)
    assert n > 0
    return tuple(found[:n])


def four(rig: Any, *, n: int = 4, **settings: Any) -> tuple[Rig, list[Text]]:
    of_engines = ("length", "curve", "tree_budget", "drafter_path")
    engine = {key: settings.pop(key) for key in of_engines if key in settings}
    shared, alone = rig(TARGET, **{**SIZES, **settings}), rig(TARGET)
    prompts = [tokens_of(alone, BEGINNINGS[i % 4])[i // 4 :] for i in range(n)]
    return shared, texts(shared, alone, prompts, **{**DFLASH, **engine})


@pytest.mark.parametrize("settings", [{}, {"draft_p_min": 0.3}], ids=str)
def test_together_as_alone(rig, settings):
    found = []
    for propose in (propose_each, propose_all):
        shared, made = four(rig, **settings)
        found.append(written(made, shared.sampler, propose, 60, any_of))
        check_counts([text.engine.stats() for text in made], propose is propose_all)
        close(made)
    assert found[0] == found[1]


@pytest.mark.parametrize("settings", [{}, {"kv_unified": True}, {"n_ubatch": 40, "n_batch": 128}], ids=str)
def test_sliding_windows(rig, tmp_path, settings):
    """Caches of a window have cells for each sequence, which blocks leave again."""
    drafter = str(with_windows(tmp_path, n=16))
    shared, made = four(rig, drafter_path=drafter, **settings)
    written(made, shared.sampler, propose_all, 120, any_of)
    check_counts([text.engine.stats() for text in made])
    close(made)


@pytest.mark.parametrize(
    "settings",
    [{"kv_unified": True}, {"draft_vocab": 64}, {"n_ubatch": 40, "n_batch": 128}, {"flash": True}],
    ids=str,
)
def test_where_drafts_may_differ(rig, settings):
    """Sums in another order, a short head, decodes of two blocks each: texts are the same."""
    flash = settings.get("flash", False)
    shared, alone = rig(TARGET, **{**SIZES, **settings}), rig(TARGET, flash=flash)
    made = texts(shared, alone, [tokens_of(alone, each) for each in BEGINNINGS], **DFLASH)
    written(made, shared.sampler, propose_all, 60, any_of)
    check_counts([text.engine.stats() for text in made])
    close(made)


def test_blocks_of_several_lengths(rig):
    """A block sees its own length: those that differ have decodes of their own, and draft as alone."""
    _, made = four(rig)
    engines, last = [text.engine for text in made], [text.run.tokens[0] for text in made]
    most = [7, 3, 7, 0]
    alone = []
    for engine, token, n in zip(engines, last, most, strict=True):
        engine.propose(token, n)
        alone.append(engine.draft())
    assert propose_all(engines, last, most) == most
    assert [each.draft() for each in engines] == alone
    close(made)


def test_more_rows_than_a_decode(rig):
    """12 blocks of 8 rows."""
    n = 12
    _, made = four(rig, n=n, n_seq_max=n, n_ctx=256 * n)
    engines, last = [text.engine for text in made], [text.run.tokens[0] for text in made]
    alone = []
    for engine, token in zip(engines, last, strict=True):
        engine.propose(token)
        alone.append(engine.draft())
    assert propose_all(engines, last, [7] * n) == [7] * n
    assert [each.draft() for each in engines] == alone
    assert all(each.stats().failed_drafts == 0 for each in engines)
    close(made)


def test_long_pauses(rig):
    """Sequences whose features waited for long, or were a prompt's, beside others that drafted just now."""
    shared, made = four(rig)
    chance = random.Random(3)
    for text in made[:2]:
        for _ in range(30):
            text.engine.propose_given(text.run.tokens[text.done - 1], [])
            text.engine.verify()
            assert text.engine.next(shared.sampler) == text.run.tokens[text.done]
            text.done += 1
    written(made, shared.sampler, propose_all, 30, any_of, seed=chance.randrange(100))
    assert all(text.engine.stats().failed_drafts == 0 for text in made)
    assert sum(text.engine.stats().accepted for text in made) > 20
    close(made)


def test_lengths_chosen_for_all(rig):
    """Texts are the same where a batch chooses how far its sequences draft."""
    shared, made = four(rig, length=_capi.LENGTH_AUTO)
    written(made, shared.sampler, propose_all, 80, any_of)
    stats = [text.engine.stats() for text in made]
    assert all(text.done > 40 for text in made)
    assert all(each.failed_drafts == 0 for each in stats)
    close(made)


def test_a_drafter_whose_memory_is_short_of_cells_begins_anew(rig):
    """A prompt is fed in pieces. What is left of one must not be fed again behind its beginning."""
    shared = rig(TARGET, n_ctx=256, n_seq_max=2, n_ubatch=64, kv_unified=True, engine=False)
    engine, other = (
        Engine(shared.ctx, shared.params, **{**shared.settings, **DFLASH}, seq_id=seq) for seq in (0, 1)
    )
    prompt = (tokens_of(shared, BEGINNINGS[0]) * 20)[:200]
    held = ctypes.c_void_p()
    assert lib.dw_drafter_memory(engine._handle, ctypes.byref(held)) == _capi.OK
    memory = native.llama_get_memory(held.value)
    fill(held.value, 1, 40)
    fill(held.value, 1, 60)
    for first in range(0, len(prompt), 64):
        engine.eval(list(prompt[first : first + 64]), first)
    error_of(lib.dw_drafter_memory(engine._handle, ctypes.byref(held)), _capi.ERR_DECODE)
    native.llama_memory_seq_rm(memory, 1, -1, -1)
    assert lib.dw_drafter_memory(engine._handle, ctypes.byref(held)) == _capi.OK
    assert native.llama_memory_seq_pos_max(memory, 0) < len(prompt)
    other.close()
    engine.close()


@pytest.mark.parametrize("n", [None, 16], ids=["no window", "windows"])
def test_a_cache_that_others_nearly_fill(rig, tmp_path, n):
    """Two texts and a third sequence take all but a few of the drafter's cells."""
    drafter = {} if n is None else {"drafter_path": str(with_windows(tmp_path, n=n))}
    shared, made = four(rig, n=2, n_seq_max=3, n_ctx=256, kv_unified=True, **drafter)
    held = ctypes.c_void_p()
    assert lib.dw_drafter_memory(made[0].engine._handle, ctypes.byref(held)) == _capi.OK
    fill(held.value, 2, 64)
    written(made, shared.sampler, propose_all, 120, lambda _: [0, 1])
    assert all(text.engine.stats().failed_drafts == 0 for text in made)
    assert sum(text.engine.stats().accepted for text in made) > 20
    close(made)


def fill(ctx: Any, seq: int, n: int) -> None:
    """Put n more tokens of a sequence into a context that nobody looks after."""
    pos = native.llama_memory_seq_pos_max(native.llama_get_memory(ctx), seq) + 1
    batch = native.llama_batch_init(n, 0, 1)
    batch.n_tokens = n
    for i in range(n):
        batch.token[i], batch.pos[i], batch.n_seq_id[i] = 5, pos + i, 1
        batch.seq_id[i][0], batch.logits[i] = seq, i == n - 1
    assert native.llama_decode(ctx, batch) == 0
    native.llama_batch_free(batch)
