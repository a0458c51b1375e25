"""On CPU a row's logits do not depend on how many rows ride along.

All else rests on this: verify rows, prefix reuse and prompts in pieces then give what single steps give.
Every comparison is bit for bit. Contract: dw_params.exact_rows in src/include/draftwood.h.
"""

from __future__ import annotations

import numpy as np
import pytest
from draftwood._llama_cpp import llama_cpp as native

from tests.model.rig import PROMPT

EVERY = range(1, 65)
SOME = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 63, 64)
TEXT = [(7 * i * i + 13 * i + 5) % 380 for i in range(64)]

# a preset whose rows hold K-quant blocks of 256
K = {"width": 512, "expert_ff": 256, "shared_ff": 256, "state_size": 128}
TYPES = {
    "F32": ("moe-mtp", {"types": "F32"}),
    "F16": ("moe-mtp", {}),
    "BF16": ("moe-mtp", {"types": "BF16"}),
    "Q8_0": ("moe-mtp", {"types": "Q8_0"}),
    "Q4_K": ("moe-mtp", {"types": "Q4_K", **K}),
    "Q5_K": ("moe-mtp", {"types": "Q5_K", **K}),
    "Q6_K": ("moe-mtp", {"types": "Q6_K", **K}),
    "IQ4_XS": ("moe-mtp", {"types": "IQ4_XS", **K}),
    "3 bits": ("q3k", {}),
    "mix": ("mix", {}),
    "dense-F16": ("dense-mtp", {}),
    "dense-Q8_0": ("dense-tied-q8", {}),
    "odd": ("odd", {}),
    "merged": ("merged", {}),
    "real-heads": ("real-heads", {}),
    "deep": ("deep", {}),
}


def rows_of(llm, prefix, pieces):
    """Evaluate `prefix`, then TEXT cut into `pieces`; return the logits of TEXT f32[sum(pieces), n_vocab]."""
    llm.reset()
    for start in range(0, len(prefix), 64):
        llm.eval(prefix[start : start + 64])
    done = 0
    for n in pieces:
        llm.eval(TEXT[done : done + n])
        done += n
    return llm.scores[len(prefix) : len(prefix) + done].copy()


def check(llm, sizes, prefix=PROMPT):
    singles = rows_of(llm, list(prefix), [1] * 64)
    assert np.isfinite(singles).all()
    assert len(np.unique(singles.argmax(1))) > 8, "a model that always says the same proves nothing"
    for n in sizes:
        rows = rows_of(llm, list(prefix), [n])
        wrong = [i for i in range(n) if not np.array_equal(rows[i], singles[i])]
        assert not wrong, f"batch of {n}: rows {wrong} differ, by up to {np.abs(rows - singles[:n]).max()}"


@pytest.fixture
def exact(llama_of):
    def make(preset, changes=None, **settings):
        defaults = {"speculation": "off", "logits_all": True, "n_batch": 64}
        return llama_of(preset, changes or {}, **{**defaults, **settings})

    return make


@pytest.mark.parametrize("name", TYPES)
def test_weights(exact, name):
    check(exact(*TYPES[name]), EVERY if name == "F16" else SOME)


CACHES = {
    "f16": {},
    "f16, flash": {"flash_attn": True},
    "f32, flash": {"flash_attn": True, "type_k": native.GGML_TYPE_F32, "type_v": native.GGML_TYPE_F32},
    "q8_0 keys": {"type_k": native.GGML_TYPE_Q8_0},
    "q8_0, flash": {"flash_attn": True, "type_k": native.GGML_TYPE_Q8_0, "type_v": native.GGML_TYPE_Q8_0},
    "q4_0, flash": {"flash_attn": True, "type_k": native.GGML_TYPE_Q4_0, "type_v": native.GGML_TYPE_Q4_0},
}


@pytest.mark.parametrize("name", CACHES)
def test_caches(exact, name):
    check(exact("much-attention", **CACHES[name]), SOME)


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("n_threads", [1, 2])
def test_long_context_and_threads(exact, flash, n_threads):
    """From 512 cached positions on, stock flash attention splits single rows among the threads."""
    prefix = [(11 * i * i + i) % 380 for i in range(600)]
    threads = {"n_threads": n_threads, "n_threads_batch": n_threads}
    llm = exact("much-attention", n_ctx=1024, flash_attn=flash, **threads)
    check(llm, (2, 5, 33, 64), prefix)


def test_with_snapshots(exact):
    """A context that can roll back computes the same rows as one that cannot."""
    plain = rows_of(exact("moe-mtp"), list(PROMPT), [1] * 64)
    drafting = exact("moe-mtp", speculation="mtp", draft_tokens=20)
    for pieces in ([1] * 64, [64], [2, 30, 1, 31], [21, 22, 21]):
        assert np.array_equal(rows_of(drafting, list(PROMPT), pieces), plain), pieces


def test_pieces(exact):
    """However a text is cut, the last row and the state behind it are the same."""
    llm = exact("moe-mtp")
    plain = rows_of(llm, list(PROMPT), [1] * 64)
    for seed in range(8):
        cuts = np.sort(np.random.default_rng(seed).choice(range(1, 64), 6, replace=False))
        pieces = np.diff([0, *cuts, 64]).tolist()
        assert np.array_equal(rows_of(llm, list(PROMPT), pieces), plain), pieces


@pytest.mark.parametrize("name", TYPES)
def test_prompts_at_once_or_in_pieces(exact, name):
    """A chat's next turn meets rows that a fresh prompt evaluates in one large batch."""
    preset, changes = TYPES[name]
    llm = exact(preset, changes, n_ctx=512, n_batch=512)
    prompt = [(5 * i * i + 3 * i + 1) % 380 for i in range(300)]
    rows = {}
    for pieces in ((300,), (1, 65, 200, 34), (64, 64, 64, 64, 44)):
        llm.reset()
        for start, n in zip(np.cumsum((0, *pieces)), pieces, strict=False):
            llm.eval(prompt[start : start + n])
        rows[pieces] = llm.scores[:300].copy()
    first, *others = rows.values()
    assert np.isfinite(first).all()
    assert all(np.array_equal(first, other) for other in others)
    assert llm.speculation_stats.exact_batches == 10


def test_the_limit_of_the_c_api(rig):
    """exact_rows is a number of rows there."""
    r = rig("moe-mtp", exact_rows=64, n_ubatch=256)
    for n, counted in ((1, 1), (64, 2), (65, 2), (200, 2)):
        r.engine.reset()
        r.engine.eval(list(range(n)), 0)
        assert r.engine.stats().exact_batches == counted, n


def test_stock_kernels_are_counted_as_such(exact):
    llm = exact("moe-mtp", exact=False, speculation="mtp")
    llm.eval(list(PROMPT))
    assert llm.speculation_stats.exact_batches == 0
