"""Prefix checkpoints: a hybrid model goes back to a chat's turns, and on as after a fresh start."""

from __future__ import annotations

import ctypes
from itertools import islice
from pathlib import Path

import pytest
from draftwood import Llama
from draftwood._llama_cpp import llama_cpp as native
from draftwood.errors import DecodeError

from tests.model.rig import PROMPT

MODELS = Path(__file__).resolve().parents[2] / "models" / "tiny-moe"
DRAFTER = str(MODELS / "dflash-f16.gguf")
SYSTEM = {"role": "system", "content": "You complete Python code. " * 12}
FIRST = {"role": "user", "content": "def read_lines(path):"}
SECOND = {"role": "user", "content": "def write_lines(path, lines):"}
MODES = {
    "off": {"speculation": "off"},
    "mtp": {"speculation": "mtp"},
    "dflash": {"speculation": "dflash", "drafter": DRAFTER},
    "ngram": {"speculation": "ngram"},
}


@pytest.fixture
def llama():
    made = []

    def make(mode="off", **settings):
        defaults = {"n_ctx": 1024, "n_threads": 1, "n_threads_batch": 1, "seed": 3, "verbose": False}
        made.append(Llama(str(MODELS / "tiny-moe-f16.gguf"), **{**defaults, **MODES[mode], **settings}))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


def answer(llm, messages, temp=0.0, n=24):
    """Return the reply's text and how many tokens were evaluated as prompt for it."""
    before = llm.speculation_stats.prompt_tokens
    reply = llm.create_chat_completion(messages, max_tokens=n, temperature=temp, seed=5)
    return reply["choices"][0]["message"]["content"], llm.speculation_stats.prompt_tokens - before


def prompt_of(llm, messages):
    """Return the number of prompt tokens as `usage` counts them."""
    return llm.create_chat_completion(messages, max_tokens=1)["usage"]["prompt_tokens"]


@pytest.mark.parametrize("temp", [0.0, 0.8])
@pytest.mark.parametrize("mode", MODES)
def test_a_second_turn_evaluates_new_tokens_only(llama, mode, temp):
    llm, fresh = llama(mode), llama("off")
    first, evaluated = answer(llm, [SYSTEM, FIRST], temp)
    assert evaluated == prompt_of(fresh, [SYSTEM, FIRST])

    turns = [SYSTEM, FIRST, {"role": "assistant", "content": first}, SECOND]
    second, evaluated = answer(llm, turns, temp)
    whole = prompt_of(fresh, turns)
    new = whole - prompt_of(fresh, [SYSTEM, FIRST])  # the reply and the second question
    assert evaluated <= new + 32, "the reply need not tokenise as it was written, the system prompt does"
    assert evaluated < whole / 2
    fresh.reset()
    assert second == answer(fresh, turns, temp)[0]


@pytest.mark.parametrize("mode", MODES)
def test_an_answer_is_asked_for_again(llama, mode):
    llm = llama(mode)
    first, whole = answer(llm, [SYSTEM, FIRST])
    again, evaluated = answer(llm, [SYSTEM, FIRST])
    assert again == first
    assert evaluated <= 32 < whole
    assert llm.speculation_stats.restored == 1


@pytest.mark.parametrize("mode", ["off", "mtp"])
def test_an_earlier_turn_is_edited(llama, mode):
    llm, fresh = llama(mode), llama("off")
    turns = [SYSTEM, FIRST]
    for question in ("and now the other way", "once more", "and at last"):
        reply, _ = answer(llm, turns)
        turns += [{"role": "assistant", "content": reply}, {"role": "user", "content": question}]
    answer(llm, turns)
    edited = [*turns[:3], {"role": "user", "content": "something else"}]
    text, evaluated = answer(llm, edited)
    assert evaluated < prompt_of(fresh, edited) / 2, "the first turn's checkpoint was kept"
    fresh.reset()
    assert text == answer(fresh, edited)[0]


def test_memory_stays_within_its_bound(llama):
    one = llama("mtp")
    answer(one, [SYSTEM, FIRST])
    size = one.speculation_stats.checkpoint_bytes
    assert one.speculation_stats.checkpoints == 1
    assert size > 0

    llm = llama("mtp", checkpoint_bytes=2 * size + 100)
    turns = [SYSTEM, FIRST]
    for _ in range(4):
        reply, _ = answer(llm, turns, n=8)
        turns += [{"role": "assistant", "content": reply}, SECOND]
        assert llm.speculation_stats.checkpoint_bytes <= 2 * size + 100
    assert llm.speculation_stats.checkpoints == 2


def test_the_least_recently_used_goes(llama):
    """Two fit; the one that was gone back to stays, the other goes."""
    llm = llama()
    prompts = [llm.tokenize(b"def read_lines(path):\n" * n) for n in (2, 4, 6)]
    tokens(llm, prompts[0], 4)
    size = llm.speculation_stats.checkpoint_bytes
    llm = llama(checkpoint_bytes=2 * size + 100)
    for prompt in (prompts[0], prompts[1], prompts[0]):  # the last goes back to its own
        tokens(llm, prompt, 4)
    assert (llm.speculation_stats.restored, llm.speculation_stats.checkpoints) == (2, 1), (
        "a cut ends later ones"
    )
    tokens(llm, prompts[1], 4)
    tokens(llm, prompts[2], 4)
    assert llm.speculation_stats.checkpoints == 2
    before = llm.speculation_stats.prompt_tokens
    tokens(llm, prompts[1], 4)
    kept = len(prompts[1]) - (llm.speculation_stats.prompt_tokens - before)
    assert kept == len(prompts[1]) - 1, "the oldest went, this one did not"


def test_one_behind_an_edit_is_not_gone_back_to(llama):
    """After an edit another text grows past the place where a checkpoint of the old one was."""
    llm, fresh = llama("mtp"), llama("off")
    common = llm.tokenize(b"def read_lines(path):\n    with open(path) as file:\n")
    old = common + llm.tokenize(b"        return file.read()\n" * 3)
    new = common + llm.tokenize(b"        for line in file:\n            yield line\n" * 4)
    assert len(new) > len(old) + 2
    tokens(llm, common, 2)
    tokens(llm, old, 2)
    tokens(llm, new[: len(old) - 3], 2)
    for length in (len(old) + 1, len(old), len(new)):
        fresh.reset()
        assert tokens(llm, new[:length]) == tokens(fresh, new[:length]), length


def test_memory_that_others_cleared(llama):
    """In mid-round, and with another text evaluated since: no copy of the old one may come back."""
    llm, fresh = llama("mtp"), llama("off")
    old = llm.tokenize(b"def read_lines(path):\n    with open(path) as file:\n" * 2)
    new = llm.tokenize(b"class Reader:\n    def __init__(self, path):\n        self.path = path\n" * 2)
    generator = llm.generate(old, temp=0.0)
    list(islice(generator, 5))
    native.llama_memory_clear(native.llama_get_memory(llm._ctx.ctx), True)
    llm.n_tokens = 0
    llm.eval(new)
    for length in (len(old), len(old) - 1, len(new)):
        fresh.reset()
        assert tokens(llm, new[:length]) == tokens(fresh, new[:length]), length


def test_none_without_memory_for_one(llama):
    for settings in ({"checkpoint_bytes": 0}, {"checkpoint_bytes": 1000}):
        llm = llama("mtp", **settings)
        first, whole = answer(llm, [SYSTEM, FIRST])
        assert answer(llm, [SYSTEM, FIRST]) == (first, whole), "evaluated anew"
        assert llm.speculation_stats.checkpoints == 0


def test_drafting_goes_on_from_a_checkpoint(llama):
    """Without the hidden state of then the first round back would have no draft."""
    llm = llama("mtp")
    answer(llm, [SYSTEM, FIRST])
    llm.reset_speculation_stats()
    answer(llm, [SYSTEM, FIRST])
    stats = llm.speculation_stats
    assert (stats.restored, stats.cold_rounds) == (1, 0)
    assert stats.drafted > 0


def tokens(llm, prompt, n=12):
    return list(islice(llm.generate(prompt, temp=0.0), n))


@pytest.mark.parametrize("what", ["state", "decode", "reset"])
def test_what_ends_them(llama, what):
    llm = llama("mtp")
    prompt = llm.tokenize(b"def read_lines(path):\n    with open(path) as file:\n")
    expected = tokens(llm, prompt)
    if what == "state":
        llm.load_state(llm.save_state())
    elif what == "decode":
        batch = native.llama_batch_get_one((ctypes.c_int32 * 1)(5), 1)
        assert native.llama_decode(llm._ctx.ctx, batch) == 0
    else:
        llm.reset()
    assert llm.speculation_stats.checkpoints == 0
    assert tokens(llm, prompt) == expected


def test_after_a_failed_decode(llama, monkeypatch):
    """What stands before the failure is not evaluated again."""
    llm = llama("mtp")
    prompt = llm.tokenize(b"def read_lines(path):\n    with open(path) as file:\n" * 4)
    expected = tokens(llm, prompt)
    calls = iter([False, False, True])  # it is asked within each decode: the first one ends half-way
    callback = native.ggml_abort_callback(lambda _: next(calls, False))
    native.llama_set_abort_callback(llm._ctx.ctx, callback, None)
    with pytest.raises(DecodeError):
        tokens(llm, prompt, 40)
    native.llama_set_abort_callback(llm._ctx.ctx, native.ggml_abort_callback(0), None)
    before = llm.speculation_stats.prompt_tokens
    assert tokens(llm, prompt) == expected
    assert llm.speculation_stats.prompt_tokens - before < len(prompt)


def test_attention_layers_need_none(llama_arch):
    llm = Llama(llama_arch, n_ctx=256, speculation="ngram", n_threads=1, verbose=False)
    expected = tokens(llm, PROMPT)
    assert tokens(llm, PROMPT) == expected
    stats = llm.speculation_stats
    assert (stats.checkpoints, stats.restored) == (0, 0)
    assert stats.prompt_tokens == len(PROMPT) + 1
    llm.close()
