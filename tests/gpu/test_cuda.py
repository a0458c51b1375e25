"""Drafting on a CUDA device. `make test-gpu`; skipped with its reason where there is none.

Batches round differently on a GPU, so of texts only beginnings are compared here, and how much is accepted
with the CPU's; test_same_text.py holds whole texts to plain decode's, near ties excused.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
from draftwood import Llama
from draftwood._llama_cpp import llama_cpp
from draftwood.engine.engine import build_info

MODELS = Path(__file__).resolve().parents[2] / "models" / "tiny-moe"
PROMPT = b"import os\nimport sys\n\n\ndef main():\n"
MODES = {
    "mtp": {"speculation": "mtp"},
    "dflash": {"speculation": "dflash", "drafter": str(MODELS / "dflash-f16.gguf")},
    "ngram": {"speculation": "ngram"},
    "auto": {},
}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not build_info()["cuda"], reason="draftwood was built without -DGGML_CUDA=on"),
    pytest.mark.skipif(not llama_cpp.llama_supports_gpu_offload(), reason="no GPU that llama.cpp can use"),
]


@pytest.fixture
def llama():
    made = []

    def make(**settings):
        common = {"n_gpu_layers": -1, "n_ctx": 1024, "verbose": False, "seed": 3}
        made.append(Llama(str(MODELS / "tiny-moe-f16.gguf"), **{**common, **settings}))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


def greedy(llm: Llama, n_tokens: int) -> list[int]:
    llm.reset()
    prompt = llm.tokenize(PROMPT, add_bos=False)
    return list(islice(llm.generate(prompt, temp=0.0), n_tokens))


@pytest.mark.parametrize("mode", MODES)
def test_drafting_begins_alike(llama, mode):
    plain, llm = llama(speculation="off"), llama(**MODES[mode])
    assert greedy(llm, 64)[:8] == greedy(plain, 64)[:8]
    assert llm.speculation_stats.rounds > 0


@pytest.mark.parametrize("mode", ["mtp", "dflash"])
def test_drafts_are_accepted(llama, keep_figures, mode):
    """As on the CPU: a wrong hidden state or position on the device would leave one token a round."""
    on_gpu, on_cpu = llama(**MODES[mode]), llama(**MODES[mode], n_gpu_layers=0)
    greedy(on_gpu, 200)
    greedy(on_cpu, 200)
    found, expected = (llm.speculation_stats.tokens_per_round for llm in (on_gpu, on_cpu))
    keep_figures(tokens_a_round=found, on_the_cpu=expected)
    assert found > 0.85 * expected > 1.2


@pytest.mark.parametrize("mode", MODES)
def test_an_answer_is_asked_for_again(llama, mode):
    """Through a checkpoint of states that lie on the device."""
    llm = llama(**MODES[mode])
    messages = [{"role": "user", "content": "def read_lines(path):" * 8}]
    texts = [llm.create_chat_completion(messages, max_tokens=24, temperature=0.0) for _ in range(2)]
    first, second = (text["choices"][0]["message"]["content"] for text in texts)
    assert second[:16] == first[:16]
    assert llm.speculation_stats.restored == 1


def test_experts_in_host_memory(llama):
    llm = llama(speculation="mtp", n_cpu_moe=4)
    assert greedy(llm, 32)[:8] == greedy(llama(speculation="off"), 32)[:8]
    assert llm.speculation_stats.accepted > 0


@pytest.mark.parametrize("mode", ["mtp", "dflash"])
def test_an_earlier_turn_is_edited(llama, mode):
    """Snapshots for drafts and checkpoints for turns side by side: what stays is the state of then."""
    llm, fresh = llama(**MODES[mode]), llama(speculation="off")
    turns = [{"role": "user", "content": "def read_lines(path):" * 8}]
    for question in ("and now the other way", "once more"):
        reply = llm.create_chat_completion(turns, max_tokens=24, temperature=0.0)
        turns += [reply["choices"][0]["message"], {"role": "user", "content": question}]
    edited = [*turns[:2], {"role": "user", "content": "something else"}]
    texts = []
    for each in (llm, fresh):
        reply = each.create_chat_completion(edited, max_tokens=24, temperature=0.0)
        texts.append(reply["choices"][0]["message"]["content"])
    assert texts[0][:16] == texts[1][:16]
    assert llm.speculation_stats.restored > 0


@pytest.mark.alone
def test_times_taken_at_load_are_those_of_rounds(llama, keep_figures, monkeypatch, tmp_path):
    """Those of a round that captures a graph would make every draft of its length look dear, for good."""
    monkeypatch.setenv("DRAFTWOOD_CURVES", str(tmp_path))
    curve = llama(draft_tokens=5)._engine.curve()
    chain = llama(speculation="mtp", draft_tokens=5)
    greedy(chain, 200)
    chain._engine.stats_reset()
    greedy(chain, 200)
    stats = chain.speculation_stats
    took = (stats.draft_seconds + stats.verify_seconds + stats.commit_seconds) / stats.rounds * 1e6
    expected = curve.draft_us[5] + curve.verify_us[6]
    keep_figures(round_us=took, by_the_curve_us=expected)
    assert 0.5 * took < expected < 1.5 * took
