"""speculation="auto": how long drafts get, from measured costs and acceptance; the text stays the same."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
from draftwood import Llama
from draftwood.engine import _capi

from tests.model.rig import PROMPT

TINY = Path(__file__).resolve().parents[2] / "models" / "tiny-moe" / "tiny-moe-f16.gguf"


@pytest.fixture
def llama(gguf):
    made = []

    def make(preset, **settings):
        path = str(preset) if isinstance(preset, Path) else gguf(preset)
        common = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "seed": 3, "verbose": False}
        made.append(Llama(path, **{**common, **settings}))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


def text(llm, n, **sampling):
    llm.reset()
    return list(islice(llm.generate(PROMPT, **sampling), n))


@pytest.mark.parametrize("temp", [0.0, 0.8])
@pytest.mark.parametrize("preset", ["moe-mtp", "planted-moe", TINY], ids=str)
def test_the_same_text(llama, preset, temp):
    assert text(llama(preset), 150, temp=temp) == text(llama(preset, speculation="off"), 150, temp=temp)


def test_drafts_that_are_never_right_pause(llama):
    """Random weights: after a few rounds plain decode, and a try now and then."""
    auto = llama("moe-mtp", draft_tokens=4)
    text(auto, 300)
    stats = auto.speculation_stats
    assert stats.accepted < 0.1 * stats.rounds
    assert stats.paused_rounds > 0.7 * stats.rounds
    assert 0 < stats.drafted < 0.6 * stats.rounds


def test_a_fixed_length_never_pauses(llama):
    fixed = llama("moe-mtp", speculation="mtp", draft_tokens=4)
    text(fixed, 60)
    assert fixed.speculation_stats.paused_rounds == 0
    assert fixed.speculation_stats.drafted == 4 * fixed.speculation_stats.rounds


def test_loading_leaves_nothing(llama):
    """The costs are measured with rounds of their own."""
    auto = llama("planted-moe")
    stats = auto.speculation_stats
    assert stats.rounds == stats.drafted == stats.emitted == stats.prompt_tokens == 0
    assert auto._engine.n_past == auto.n_tokens == 0


def test_a_length_that_makes_no_sense(rig):
    r = rig(engine=False)
    params = _capi.Params()
    _capi.lib.dw_params_init(params)
    params.length = 7
    handle = _capi.EngineHandle()
    assert _capi.lib.dw_engine_new(r.ctx, r.params, params, handle) == _capi.ERR_ARGUMENT
    assert b"length is 7" in _capi.lib.dw_last_error()
