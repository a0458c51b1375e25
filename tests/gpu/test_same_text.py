"""Greedy text on a GPU is plain decode's, whoever drafts and however wide: teacher.py says how it is held.

`make test-gpu` runs this with CUDA graphs and without.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
from draftwood import Llama
from draftwood._llama_cpp import llama_cpp
from draftwood.engine import drafting
from draftwood.engine.engine import build_info

from tests.gpu.teacher import Verdict, judge, measured_margin, rows_along
from tests.model.test_dflash import with_windows
from tests.unit.cost_curves import curve

MODELS = Path(__file__).resolve().parents[2] / "models" / "tiny-moe"
DRAFTER = {"drafter": str(MODELS / "dflash-f16.gguf")}
MODES = {
    "mtp": {"speculation": "mtp"},
    "mtp-12": {"speculation": "mtp", "draft_tokens": 12},
    "mtp-cut": {"speculation": "mtp", "draft_p_min": 0.3},
    "mtp-few": {"speculation": "mtp", "draft_vocab": 64},
    "mtp-tree": {"speculation": "mtp", "tree_budget": 16},
    "mtp-tree-64": {"speculation": "mtp", "tree_budget": 64, "draft_tokens": 8},
    "dflash": {"speculation": "dflash", **DRAFTER},
    "dflash-tree": {"speculation": "dflash", "tree_budget": 24, "draft_tokens": 12, **DRAFTER},
    "ngram": {"speculation": "ngram"},
    "tree": {"speculation": "tree"},
    "auto": {},
}
PROMPTS = [
    b"import os\nimport sys\n\n\ndef main():\n",
    b'{"name": "tree", "nodes": [{"id": 1, "parent": null}, {"id": 2, "parent": ',
    b"It was the best of times, it was the worst of times, it was the age of ",
]
TOKENS = 400
# rows of a verify, more than the 16 whose bits are those of one row
WIDE = {"mtp-tree-64": 64, "dflash-tree": 24}
DEAR = curve({1: 1e9, 63: 63e9}, {1: 1e3, 2: 1e6, 64: 64e6})  # microseconds: no draft pays, n-grams neither
ALLOWED = 0.002  # share of tokens that rounding may excuse, where verifies are wide

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not build_info()["cuda"], reason="draftwood was built without -DGGML_CUDA=on"),
    pytest.mark.skipif(not llama_cpp.llama_supports_gpu_offload(), reason="no GPU that llama.cpp can use"),
]


def load(**settings) -> Llama:
    common = {"n_gpu_layers": -1, "n_ctx": 1536, "verbose": False, "flash_attn": True}
    return Llama(str(MODELS / "tiny-moe-f16.gguf"), **{**common, **settings})


def texts(llm: Llama) -> list[tuple[list[int], list[int]]]:
    made = []
    for text in PROMPTS:
        prompt = llm.tokenize(text, add_bos=False)
        llm.reset()
        made.append((prompt, list(islice(llm.generate(prompt, temp=0.0), TOKENS))))
    return made


@pytest.fixture(scope="module", params=[True, False], ids=["flash", "no-flash"])
def flash(request):
    return request.param


@pytest.fixture(scope="module")
def plain(flash):
    # has room for given drafts; generate() is not called
    llm = load(speculation="ngram", draft_tokens=63, flash_attn=flash)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def margins(plain, flash):
    """By rows of a verify; 0 where their bits are those of one row, which takes flash attention."""
    off = load(speculation="off", flash_attn=flash)
    prompt, tokens = texts(off)[0]
    off.close()
    return {n: measured_margin(plain, prompt, tokens, n) for n in (8, 16, *WIDE.values())}


def test_rows_have_the_bits_of_one(margins, flash):
    assert not flash or margins[8] == margins[16] == 0.0, margins


@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=pytest.mark.alone) if mode == "auto" else mode for mode in MODES]
)
def test_greedy_text_is_plain_decodes(plain, margins, keep_text, mode, flash):
    llm = load(**MODES[mode], flash_attn=flash)
    check(llm, plain, margins[WIDE.get(mode, 16)], keep_text, f"{mode}, flash attention {flash}")


def test_a_drafter_with_sliding_windows(plain, margins, keep_text, tmp_path, flash):
    """Some of its layers attend to 64 positions, in caches of their own."""
    llm = load(speculation="dflash", drafter=with_windows(tmp_path), flash_attn=flash)
    check(llm, plain, margins[16], keep_text, f"dflash with windows, flash attention {flash}")


def check(llm, plain, margin, keep_text, name):
    """Hold texts of a model that drafts to those of plain decoding, and close it."""
    verdict, made = Verdict(margin), texts(llm)
    stats, refusal = llm.speculation_stats, llm.tree_refusal
    llm.close()
    for prompt, tokens in made:
        judge(verdict, rows_along(plain, prompt, tokens), tokens)
    keep_text(name, verdict, tokens_a_round=stats.tokens_per_round)
    assert refusal == ""
    assert stats.accepted > 0
    assert verdict.mismatches == 0, verdict
    assert verdict.share_excused <= ALLOWED, verdict


def test_plain_text_is_its_own(plain, flash):
    """The yardstick: plain decoding itself, and it must be able to fail."""
    off = load(speculation="off", flash_attn=flash)
    verdict, spoilt = Verdict(0.0), Verdict(0.0)
    for prompt, tokens in texts(off):
        rows = rows_along(plain, prompt, tokens)
        judge(verdict, rows, tokens)
        judge(spoilt, rows, [(token + 1) % off.n_vocab() for token in tokens])
    off.close()
    assert (verdict.mismatches, verdict.excused) == (0, 0), verdict
    assert spoilt.mismatches > 0.9 * spoilt.tokens


def test_queued_steps_give_the_text_of_steps_that_wait(flash, monkeypatch):
    """Also behind a state that was saved while one was queued, and behind a text that was sampled."""
    monkeypatch.setenv("DRAFTWOOD_QUEUE_STEPS", "0")
    waits = load(speculation="off", flash_attn=flash, seed=1)
    wanted = texts(waits)
    sampled = list(islice(waits.generate(wanted[0][0], temp=0.8, top_k=40), 64))
    assert waits.speculation_stats.queued_steps == 0
    waits.close()
    monkeypatch.delenv("DRAFTWOOD_QUEUE_STEPS")
    queues = load(speculation="off", flash_attn=flash, seed=1)
    assert texts(queues) == wanted
    stats = queues.speculation_stats
    assert stats.queued_steps == stats.rounds - len(PROMPTS) == len(PROMPTS) * (TOKENS - 2)
    assert stats.logits_rows == 0
    assert list(islice(queues.generate(wanted[0][0], temp=0.8, top_k=40), 64)) == sampled
    prompt, tokens = wanted[1]
    first = list(islice(queues.generate(prompt, temp=0.0), 100))
    state = queues.save_state()
    queues.reset()
    queues.load_state(state)
    rest = list(islice(queues.generate([*prompt, *first], temp=0.0), TOKENS - 100))
    queues.close()
    assert first + rest == tokens


@pytest.mark.parametrize("settings", [{}, DRAFTER], ids=["mtp", "dflash"])
def test_queued_steps_of_a_pause_give_that_text_too(settings, monkeypatch):
    off = load(speculation="off")
    wanted = texts(off)
    off.close()
    monkeypatch.setattr(drafting.curves, "load", lambda _: DEAR)
    auto = load(**settings)
    assert texts(auto) == wanted
    stats = auto.speculation_stats
    assert stats.drafted == 0
    assert stats.queued_steps > 0.9 * stats.rounds
    assert stats.dropped_steps == len(PROMPTS)
    auto.close()


def test_queued_steps_over_a_pool_give_that_text_too():
    """Half of the experts lie there."""
    off = load(speculation="off")
    wanted = texts(off)
    off.close()
    pooled = load(speculation="off", expert_vram="4MiB")
    assert pooled.expert_stats is not None
    assert texts(pooled) == wanted
    stats = pooled.speculation_stats
    pooled.close()
    assert stats.queued_steps == stats.rounds - len(PROMPTS)


@pytest.mark.parametrize("mode", ["mtp", "dflash", "tree"])
def test_logits_stay_on_the_device(mode):
    """Rounds copy no logits to the host; chains go into their verify there, and MTP's begin behind it."""
    llm = load(**MODES[mode])
    texts(llm)
    stats = llm.speculation_stats
    llm.close()
    assert stats.logits_rows == 0
    assert stats.draft_vocab == (0 if mode == "dflash" else 4096 // 4)
    if mode != "tree":
        assert stats.ahead_rounds > 0.9 * stats.rounds
        assert stats.begun_drafts > 0.9 * stats.rounds


@pytest.mark.parametrize("draft_tokens", [1, 8])
def test_a_short_head_there_drafts_what_it_drafts_here(draft_tokens):
    """The prompt fills it: none of its tokens is among the first 1,024."""
    prompt = [1024 + 7 * i % 3000 for i in range(600)]
    rates = []
    for n_gpu_layers in (0, -1):
        few = {"draft_vocab": 1024, "draft_tokens": draft_tokens, "n_gpu_layers": n_gpu_layers}
        llm = load(speculation="mtp", **few)
        list(islice(llm.generate(prompt, temp=0.0), 256))
        rates.append(llm.speculation_stats.tokens_per_round)
        llm.close()
    assert rates[1] == pytest.approx(rates[0], rel=0.05)
    assert rates[1] > 1.05


@pytest.mark.parametrize("n_gpu_layers", [1, 5, 13])
@pytest.mark.parametrize("mode", ["mtp", "dflash", "mtp-tree"])
def test_layers_on_both_sides(keep_text, mode, n_gpu_layers):
    """With the head, the last layers, or all but the embeddings on the card: same text, drafts as good."""
    whole, part = load(**MODES[mode]), load(**MODES[mode], n_gpu_layers=n_gpu_layers)
    plain = load(speculation="ngram", draft_tokens=7, n_gpu_layers=n_gpu_layers)
    verdict = Verdict(0.0)
    texts(whole)
    for prompt, tokens in texts(part):
        judge(verdict, rows_along(plain, prompt, tokens), tokens)
    expected, found = (llm.speculation_stats.tokens_per_round for llm in (whole, part))
    refusal = part.tree_refusal
    for llm in (whole, part, plain):
        llm.close()
    keep_text(f"{mode}, {n_gpu_layers} layers there", verdict, tokens_a_round=found, whole=expected)
    assert refusal == ""
    assert (verdict.mismatches, verdict.excused) == (0, 0), verdict
    assert found > 0.9 * expected


@pytest.mark.parametrize("mode", ["mtp", "dflash"])
def test_a_first_prompt_of_many_pieces(keep_figures, mode):
    """Inputs of one piece are on their way to the card while the next one is prepared."""
    prompt = [300 + i % 97 for i in range(64 * 9)]
    rates = []
    for n_ubatch in (32, 1024):
        llm = load(**MODES[mode], n_batch=n_ubatch, n_ubatch=n_ubatch)
        list(islice(llm.generate(prompt, temp=0.0), 128))
        rates.append(llm.speculation_stats.tokens_per_round)
        llm.close()
    keep_figures(tokens_a_round=rates[0], in_one_piece=rates[1])
    assert rates[0] > 0.85 * rates[1] > 1.0, rates
