"""src/decode: which parts of a graph become one op each, and that text stays what it was.

On a CPU the ops are references; engines run them there because a test says so.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from draftwood import Llama
from draftwood._llama_cpp import llama_cpp as native
from draftwood.engine import _capi
from draftwood.engine.experts import ExpertPool

from bench import testing_api as api
from tests.model.rig import PROMPT, Rig
from tests.model.test_expert_pool import LAYERS, rows_of

MODELS = Path(__file__).resolve().parents[2] / "models" / "tiny-moe"
TINY = str(MODELS / "tiny-moe-f16.gguf")
ALWAYS = {"experts": 12, "delta inputs": 9, "delta heads": 9, "delta output": 9, "attention inputs": 3}
ALWAYS |= {"attention output": 3, "product": 1}
OF_TINY = {**ALWAYS, "delta front": 9, "delta step": 9}
OF_TINY.pop("delta heads")
DELTA_NET = {"delta inputs", "delta front", "delta step", "delta output"}
ATTENTION = {"attention inputs", "attention output", "product"}
WAYS = {
    "mtp": {"speculation": "mtp"},
    "tree": {"speculation": "tree", "tree_budget": 16},
    "ngram": {"speculation": "ngram"},
    "dflash": {"speculation": "dflash", "drafter": str(MODELS / "dflash-f16.gguf")},
}
POOLED = {
    "f16": {},
    "q4_k and q6_k": {"types": "*down_exps*=Q6_K,Q4_K", "width": 256, "expert_ff": 256},
    "merged": {"merged_experts": True, "types": "Q8_0"},
}
TOKENS = [(7 * i * i + 3 * i) % 380 + 1 for i in range(25)]
TEXT = b"import os\nimport sys\n\n\ndef main():\n    for name in "


def counts(engine) -> dict[str, int]:
    return {part: n for part, n in api.fused(engine).items() if n}


def load(where: int = api.FUSE_EVERYWHERE, **settings) -> Llama:
    llm = Llama(TINY, n_ctx=512, verbose=False, n_threads=1, **settings)
    api.fuse(llm._engine, where)
    return llm


def text(llm: Llama, n: int, **sampling) -> list[int]:
    llm.set_seed(5)
    return list(islice(llm.generate(llm.tokenize(TEXT, add_bos=False), **sampling), n))


@pytest.fixture(scope="module")
def plain():
    llm = load(speculation="off")
    yield {temp: text(llm, 24, temp=temp) for temp in (0.0, 0.8)}
    llm.close()


def test_every_layer_of_a_plain_step_is_fused():
    llm = load(speculation="off")
    text(llm, 2, temp=0.0)
    assert counts(llm._engine) == OF_TINY
    assert llm.speculation_stats.fused_parts == sum(OF_TINY.values())
    llm.close()


def test_logits_are_near_llama_cpps(rig):
    """Of a chain of rows, random weights: the two round activations otherwise."""
    rows = []
    for where in (api.FUSE_NOWHERE, api.FUSE_EVERYWHERE):
        r = rig(TINY)
        api.fuse(r.engine, where)
        r.engine.eval(PROMPT[:-1], 0)
        r.engine.propose_given(PROMPT[-1], [5, 7, 9])
        r.engine.verify()
        assert bool(counts(r.engine)) == (where == api.FUSE_EVERYWHERE)
        rows.append(np.array([r.logits(i) for i in range(4)]))
        r.close()
    distance = np.linalg.norm(rows[1] - rows[0]) / np.linalg.norm(rows[0])
    assert 0 < distance < 5e-3


@pytest.mark.parametrize("temp", [0.0, 0.8])
@pytest.mark.parametrize("way", WAYS)
def test_text_is_the_same_with_drafts(plain, way, temp):
    llm = load(**WAYS[way])
    assert text(llm, 24, temp=temp) == plain[temp]
    assert counts(llm._engine) == ALWAYS  # a verify leaves the recurrent state alone
    assert llm._engine.stats().drafted > 0
    llm.close()


@pytest.mark.parametrize(("preset", "own"), [("moe-mtp", "experts"), ("dense-mtp", "feed forward")])
@pytest.mark.parametrize("types", ["F16", "Q8_0"])
def test_both_architectures_and_types(gguf, rig, preset, own, types):
    r = rig(gguf(preset, types=types))
    api.fuse(r.engine, api.FUSE_EVERYWHERE)
    r.engine.eval(PROMPT, 0)
    assert set(counts(r.engine)) == {own, *DELTA_NET, *ATTENTION}


def test_prompts_and_gpus_alone_stay_llama_cpps(rig):
    r = rig(TINY)
    r.engine.eval(PROMPT, 0)
    assert not counts(r.engine)  # on a CPU nobody asked for it
    api.fuse(r.engine, api.FUSE_EVERYWHERE)
    r.engine.eval([*PROMPT, *PROMPT], len(PROMPT))
    assert counts(r.engine) == {"product": 1}  # of one row, the last
    r.engine.eval(PROMPT, 3 * len(PROMPT))
    assert counts(r.engine) == OF_TINY


def test_who_looks_at_nodes_sees_llama_cpps(rig):
    seen = []

    @native.ggml_backend_sched_eval_callback
    def look(tensor, ask, _):
        seen.append(ask)
        return False

    r = rig(TINY, cb_eval=look)
    api.fuse(r.engine, api.FUSE_EVERYWHERE)
    r.engine.eval(PROMPT, 0)
    assert seen
    assert not counts(r.engine)


def test_without_exact_rows_nothing_is_fused(rig):
    r = rig(TINY, exact_rows=0, drafter=_capi.DRAFTER_NONE)
    r.engine.eval(PROMPT, 0)
    assert not counts(r.engine)


def decode(r, rows: list[tuple[int, int, int]]) -> None:
    """Decode (token, position, sequence) in one batch, each with logits, past the engine."""
    batch = native.llama_batch_init(len(rows), 0, 1)
    batch.n_tokens = len(rows)
    for i, (token, position, sequence) in enumerate(rows):
        batch.token[i], batch.pos[i], batch.logits[i] = token, position, True
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
    assert native.llama_decode(r.ctx, batch) == 0
    native.llama_batch_free(batch)


def test_two_sequences_in_a_batch(rig):
    """Their states lie in two cells, which llama.cpp copies; what follows is near what its own nodes give."""
    rows = []
    for where in (api.FUSE_NOWHERE, api.FUSE_EVERYWHERE):
        r = rig(TINY, n_seq_max=2, n_ctx=512)
        api.fuse(r.engine, where)
        for sequence in (1, 0):
            decode(r, [(token, i, sequence) for i, token in enumerate(PROMPT[: 5 + sequence])])
        for step in range(3):
            decode(r, [(7 + step, 5 + step, 0), (9 + step, 6 + step, 1)])
        assert bool(counts(r.engine)) == (where == api.FUSE_EVERYWHERE)
        assert "delta front" not in counts(r.engine)
        decode(r, [(3, 9, 1)])
        assert ("delta front" in counts(r.engine)) == (where == api.FUSE_EVERYWHERE)
        decode(r, [(4, 8, 0), (5, 10, 1)])
        rows.append(np.array([r.logits(0), r.logits(1)]))
        r.close()
    assert 0 < np.linalg.norm(rows[1] - rows[0]) / np.linalg.norm(rows[0]) < 5e-3


@pytest.mark.parametrize("guess", [False, True], ids=["", "guesses"])
@pytest.mark.parametrize("kind", POOLED)
def test_experts_in_a_pool_are_those_of_one_memory(gguf, kind, guess):
    """The same rows bit for bit at any number of slots, and every layer of it is fused."""
    path = gguf("moe-mtp", experts=16, top_k=3, **POOLED[kind])
    batches = [1, 1, 4, 1, 16, 2]
    found = {}
    for slots in (None, 0, 1, 4, 8, 15):
        pool = None if slots is None else ExpertPool(slots, guess=guess)
        r = Rig(path, pool=pool)
        api.fuse(r.engine, api.FUSE_EVERYWHERE)
        found[slots] = rows_of(r, TOKENS, batches)
        assert counts(r.engine)["experts"] == LAYERS, slots
        misses = pool.stats().misses if pool else 0
        assert (misses > 0) == bool(slots)
        r.close()
        if pool:
            pool.close()
    assert all(np.array_equal(rows, found[None]) for rows in found.values())


def test_a_pool_of_few_experts_stays_llama_cpps(gguf):
    """A row of sorted experts has no room for the weights."""
    pool = ExpertPool(2)
    r = Rig(gguf("moe-mtp", experts=4, top_k=3), pool=pool)
    api.fuse(r.engine, api.FUSE_EVERYWHERE)
    r.engine.eval(PROMPT[:4], 0)
    assert "experts" not in counts(r.engine)
    assert "delta inputs" in counts(r.engine)
    r.close()
    pool.close()
