"""`Llama.generate` and all that stands on it: the same with drafting on and off, whatever the caller does.

The planted model accepts about two of three drafts, so rounds of every length occur (checked below). "On"
drafts, "off" runs the same engine without drafter, "stock" is llama-cpp-python's own loop.
"""

from __future__ import annotations

import gc
import itertools
import pickle
import signal
import sys
import warnings

import draftwood.generation as generation_module
import numpy as np
import pytest
from draftwood import ClosedError, ContextFullError, OptionError, UnsupportedError
from draftwood._llama_cpp import llama_cpp as native
from draftwood._llama_cpp.llama import LogitsProcessorList, StoppingCriteriaList
from draftwood._llama_cpp.llama_cache import LlamaRAMCache
from draftwood._llama_cpp.llama_grammar import LlamaGrammar

from tests.model.rig import PROMPT

P = list(PROMPT)
STOCK = {"speculation": "off", "exact": False}


@pytest.fixture
def on(llama):
    return llama(speculation="mtp", draft_tokens=5)


@pytest.fixture
def off(llama):
    return llama(speculation="off")


@pytest.fixture(params=["on", "off"])
def either(request):
    return request.getfixturevalue(request.param)


def text(llm, n=40, prompt=PROMPT, **settings):
    """n tokens, then a `break` as any consumer does it."""
    settings.setdefault("temp", 0.0)
    generator = llm.generate(list(prompt), **settings)
    tokens = list(itertools.islice(generator, n))
    generator.close()
    return tokens


def fresh(llm, n=40, prompt=PROMPT, **settings):
    llm.reset()
    return text(llm, n, prompt, **settings)


# --- the same text --------------------------------------------------------------------------------------

SAMPLING = {
    "greedy": {"temp": 0.0},
    "temp": {"temp": 0.8},
    "hot": {"temp": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "distribution": {"temp": -1.0},
    "top-k": {"temp": 0.8, "top_k": 3},
    "top-p": {"temp": 0.9, "top_p": 0.5, "min_p": 0.0},
    "min-p": {"temp": 0.9, "min_p": 0.2},
    "typical": {"temp": 0.9, "typical_p": 0.4},
    "mirostat-1": {"temp": 0.8, "mirostat_mode": 1},
    "mirostat-2": {"temp": 0.8, "mirostat_mode": 2, "mirostat_tau": 3.0},
    "repeat": {"temp": 0.8, "repeat_penalty": 1.4},
    "penalties": {"temp": 0.0, "repeat_penalty": 1.2, "frequency_penalty": 0.7, "presence_penalty": 0.7},
}


@pytest.mark.parametrize("name", SAMPLING)
def test_sampling_is_the_same(on, off, name):
    expected = text(off, 60, **SAMPLING[name])
    assert text(on, 60, **SAMPLING[name]) == expected
    assert fresh(on, 60, **SAMPLING[name]) == expected, "one seed, one text"
    assert fresh(off, 60, **SAMPLING[name]) == expected


@pytest.mark.parametrize("preset", ["planted-dense", "moe-mtp", "odd", "q4k", "tied-mtp", "mtp-heads"])
def test_presets(llama, preset):
    on, off = llama(preset, speculation="mtp"), llama(preset, speculation="off")
    assert text(on, 60) == text(off, 60)
    assert text(on, 60, temp=0.8) == text(off, 60, temp=0.8)


@pytest.mark.parametrize("draft_tokens", [1, 2, 3, 16, 63])
def test_draft_lengths(llama, draft_tokens):
    on, off = llama(speculation="mtp", draft_tokens=draft_tokens), llama(speculation="off")
    assert text(on, 80, temp=0.5) == text(off, 80, temp=0.5)
    assert len(on.speculation_stats.drafted_by_depth) == draft_tokens


def test_draft_p_min(llama, off):
    unsure = llama(speculation="mtp", draft_tokens=5, draft_p_min=0.5)
    assert text(unsure, 80) == text(off, 80)
    stats = unsure.speculation_stats
    assert 0 < stats.drafted < 5 * stats.rounds


def test_rounds_of_every_length_occur(on):
    """Without this the tests of this file would prove little."""
    text(on, 200)
    stats = on.speculation_stats
    reached, taken = stats.drafted_by_depth, stats.accepted_by_depth
    ends = [reached[0] - taken[0], *(taken[i] - taken[i + 1] for i in range(4)), taken[4]]
    assert all(n > 0 for n in ends), f"rounds by accepted length: {ends}"
    assert stats.cold_rounds == 0
    assert stats.emitted == 200
    assert stats.tokens_per_round > 1.5
    assert stats.to_dict()["tokens_per_round"] == stats.tokens_per_round
    on.reset_speculation_stats()
    assert on.speculation_stats.rounds == 0


def test_seeds(on, off):
    texts = []
    for seed in (1, 2):
        for llm in (on, off):
            llm.set_seed(seed)
            texts.append(fresh(llm, 40, temp=0.9))
    assert texts[0] == texts[1]
    assert texts[2] == texts[3]
    assert texts[0] != texts[2]


@pytest.mark.parametrize("n_ubatch", [64, 128])
@pytest.mark.parametrize("length", [63, 64, 65, 66, 69, 70, 71, 127, 128, 129, 133, 200])
def test_prompts_are_cut_where_they_are_without_drafting(llama, length, n_ubatch):
    """A draft needs a larger batch than the caller gave; prompts are cut by the caller's."""
    prompt = [(7 * i * i + i) % 380 for i in range(length)]
    scores = []
    for speculation in ("mtp", "off"):
        llm = llama(speculation=speculation, n_batch=128, n_ubatch=n_ubatch, logits_all=True)
        tokens = text(llm, 12, prompt)
        scores.append((tokens, llm.scores[: llm.n_tokens].copy()))
        llm.close()
    assert scores[0][0] == scores[1][0]
    assert np.array_equal(scores[0][1], scores[1][1])


@pytest.mark.parametrize(
    "small", [{"n_batch": 1}, {"n_batch": 8}, {"n_ubatch": 3}, {"n_batch": 1, "n_ubatch": 1}]
)
def test_small_batches_are_raised_in_words(llama, off, small):
    with pytest.warns(UserWarning, match="a draft needs at least 18") as seen:
        on = llama(speculation="mtp", draft_tokens=16, **small)
    assert len(seen) == 1
    assert seen[0].filename == __file__ or "conftest" in seen[0].filename
    for name, value in small.items():
        assert f"{name}={value}" in str(seen[0].message)
    assert on.n_batch >= 18
    assert text(on, 40) == text(off, 40)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert text(llama(speculation="off", **small), 40) == text(off, 40)


@pytest.mark.parametrize("small", [{"n_batch": 8}, {"n_ubatch": 64}, {"n_ubatch": 0}], ids=str)
@pytest.mark.filterwarnings("ignore:found n_:UserWarning")
def test_raised_batches_do_not_move_the_cut(llama, small):
    """The longest draft needs batches of 65, which are not row-exact; the prompt still enters as asked."""
    prompt = [(7 * i * i + 3 * i) % 380 for i in range(150)]
    seen = []
    for speculation in ("mtp", "off"):
        llm = llama("q4k", speculation=speculation, draft_tokens=63, logits_all=True, **small)
        seen.append((text(llm, 12, prompt), llm.scores[:150].copy()))
    assert llm.speculation == "off"
    assert seen[0][0] == seen[1][0]
    assert np.array_equal(seen[0][1], seen[1][1])


def test_a_pickled_llama_cuts_as_its_original(llama):
    with pytest.warns(UserWarning, match="a draft needs"):
        llm = llama(speculation="mtp", n_batch=3)
    assert llm.__getstate__()["n_batch"] == 3


# --- bookkeeping ----------------------------------------------------------------------------------------


def test_n_tokens_after_each_yield(either):
    tokens = []
    for k, token in enumerate(either.generate(P, temp=0.0), start=1):
        tokens.append(token)
        assert either.n_tokens == len(P) + k - 1
        assert either._input_ids.tolist() == [*P, *tokens[:-1]]
        assert list(either.eval_tokens) == [*P, *tokens[:-1]]
        if k == 40:
            break
    assert either.n_tokens == len(P) + 39


def continuations(tokens):
    """Prompts that share more or less of what the context holds after `tokens`."""
    held = [*P, *tokens]
    return {
        "longer": [*held, 11, 12, 13],
        "equal": held,
        "one less": held[:-1],
        "what is evaluated": held[:-1] if len(tokens) else held,
        "shorter": held[: len(P) + len(tokens) // 2],
        "the prompt": P,
        "changed end": [*held[:-1], (held[-1] + 1) % 380, 5],
        "changed middle": [*held[: len(held) // 2], 379, *held[len(held) // 2 :]],
        "another": [9, 8, 7],
        "one token": P[:1],
    }


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 6, 7, 8, 13])
def test_break_and_go_on_with_another_prompt(on, off, k):
    tokens = text(off, k)
    for name, prompt in continuations(tokens).items():
        assert fresh(on, k) == tokens
        assert text(on, 25, prompt) == fresh(off, 25, prompt), name
        assert fresh(off, k) == tokens
        assert text(off, 25, prompt) == fresh(off, 25, prompt), f"{name}, off"


def test_chain_of_turns(llama):
    """Ten requests, each on top of the last, never evaluated from nothing."""
    on, off = llama(speculation="mtp", n_batch=64), llama(speculation="off", n_batch=64)
    prompt, evaluated = list(P), 0
    for turn in range(10):
        expected = fresh(off, 3 + turn, prompt, temp=0.7)
        assert text(on, 3 + turn, prompt, temp=0.7) == expected
        evaluated += len(prompt)
        prompt = [*prompt, *expected, turn, turn + 1]
    assert on.speculation_stats.prompt_tokens < evaluated / 2, "prefixes were reused"


@pytest.mark.parametrize("sent", [[], [5], [5, 6, 7]])
@pytest.mark.parametrize("at", [1, 2, 3, 4, 5, 6, 7])
def test_send(on, off, at, sent):
    def conversation(llm):
        llm.reset()
        generator = llm.generate(P, temp=0.0)
        got = [next(generator)]
        for i in range(1, 30):
            got.append(generator.send(sent) if i % at == 0 else next(generator))
        generator.close()
        return got, llm.n_tokens, llm._input_ids.tolist()

    assert conversation(on) == conversation(off)


@pytest.mark.parametrize("k", range(1, 8))
def test_without_reset(on, off, k):
    """reset=False adds the prompt behind what is evaluated."""
    results = []
    for llm in (on, off):
        text(llm, k)
        results.append((text(llm, 20, [40, 41], reset=False), llm.n_tokens))
        results.append((text(llm, 5, [42], reset=False), llm.n_tokens))
    assert results[:2] == results[2:]
    assert results[1][1] == len(P) + (k - 1) + 2 + 19 + 1 + 4


def test_empty_prompt_goes_on_from_eval(llama, either):
    stock = llama(**STOCK)
    first = []
    for llm in (stock, either):
        llm.eval(P)
        first.append(text(llm, 1, [], reset=False))
    assert first[0] == first[1]
    assert text(either, 20, [*P, *first[1]]) == fresh(either, 20, [*P, *first[1]])


def test_generate_after_eval_of_the_same_prompt(either):
    expected = fresh(either, 20)
    either.reset()
    either.eval(P)
    assert text(either, 20) == expected


def test_empty_prompt_of_nothing(either):
    with pytest.raises(OptionError, match="empty prompt"):
        text(either, 1, [])
    assert len(text(either, 3)) == 3


# --- several generators, interruptions ------------------------------------------------------------------


def test_stale_generator_closed_late(on, off):
    expected = text(off, 30), fresh(off, 30, [9, 8, 7])
    for k in range(1, 7):
        old = on.generate(P, temp=0.0)
        assert list(itertools.islice(old, k)) == expected[0][:k]
        new = on.generate([9, 8, 7], temp=0.0)
        got = list(itertools.islice(new, k))
        old.close()
        got += itertools.islice(new, 30 - k)
        new.close()
        assert got == expected[1]


def test_stale_generator_dropped_within_a_processor(on, off):
    """The garbage collector may end a generator at any time, also inside a callback of the next one."""
    expected = fresh(off, 30, [9, 8, 7])
    for k in range(1, 12):
        stale = [on.generate(P, temp=0.0)]
        next(stale[0])
        calls = []

        def drop(ids, scores, stale=stale, calls=calls, k=k):
            calls.append(len(ids))
            if len(calls) == k:
                stale.clear()
                gc.collect()
            return scores

        assert text(on, 30, [9, 8, 7], logits_processor=[drop]) == expected
        assert not stale
        assert calls == list(range(3, 33))


def test_resuming_a_stale_generator_is_no_crash(python, gguf):
    """Its sampler is still alive; it says that another has taken over, and the next request is exact."""
    done = python(
        """
        import gc, sys, itertools
        from draftwood import Llama
        settings = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
        llm = Llama(sys.argv[1], speculation=sys.argv[2], seed=7, **settings)
        expected = list(itertools.islice(llm.generate([1, 2, 3], temp=0.7), 20))
        for k in (1, 2, 3, 5):
            old = llm.generate([1, 2, 3], temp=0.7)
            for _ in range(k): next(old)
            new = llm.generate([4, 5, 6], temp=0.7, top_k=5)
            for _ in range(k): next(new)
            gc.collect()
            junk = [bytearray(4096) for _ in range(200)]
            try:
                for _ in range(10): next(old)
            except Exception as error:
                print(type(error).__name__)
            try:
                for _ in range(3): next(new)
            except Exception as error:
                print(type(error).__name__)
            del old, new
            llm.reset()
            got = list(itertools.islice(llm.generate([1, 2, 3], temp=0.7), 20))
            assert got == expected, (k, got, expected)
        print("fine")
        """,
        gguf("planted-moe"),
        "mtp",
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.endswith("fine\n")


def test_generator_outlives_close(llama):
    llm = llama(speculation="mtp")
    generator = llm.generate(P, temp=0.0)
    next(generator)
    llm.close()
    with pytest.raises(ClosedError, match="closed"):
        drain(generator, [])
    generator.close()


class Boom(Exception):
    pass


def drain(generator, into):
    """Append all that comes, so that what came before an exception can be looked at."""
    for token in generator:
        into.append(token)


@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt, SystemExit, StopIteration])
@pytest.mark.parametrize("at", [1, 2, 3, 5, 8])
def test_processor_that_raises(either, off, at, error):
    calls = []

    def processor(ids, scores):
        calls.append(ids.tolist())
        if len(calls) == at:
            raise error("stop")
        return scores

    generator = either.generate(P, temp=0.0, logits_processor=LogitsProcessorList([processor]))
    expected = RuntimeError if error is StopIteration else error  # PEP 479
    got = []
    with pytest.raises(expected):
        drain(generator, got)
    assert len(calls) == at, "no processor runs after one has raised"
    assert calls[-1] == [*P, *got]
    assert either.n_tokens == len(P) + at - 1
    assert text(either, 20, calls[-1]) == fresh(off, 20, calls[-1])


def test_second_processor_is_not_called_after_the_first_raised(either):
    called = []

    def first(ids, scores):
        raise Boom

    def second(ids, scores):
        called.append(1)
        return scores

    with pytest.raises(Boom):
        text(either, 3, logits_processor=[first, second])
    assert not called


@pytest.mark.parametrize("settings", [{"speculation": "mtp"}, {"speculation": "off"}, STOCK], ids=str)
def test_no_exception_of_a_processor_is_lost(llama, settings):
    llm = llama(**settings)

    def bad(ids, scores):
        raise Boom("lost?")

    with pytest.raises(Boom, match="lost"):
        text(llm, 3, logits_processor=[bad])
    llm.reset()
    llm.eval(P)
    llm._sampler = None
    with pytest.raises(Boom, match="lost"):
        llm.sample(logits_processor=[bad])
    assert len(text(llm, 5)) == 5


@pytest.mark.parametrize(
    "result", [None, "text", [1.0, 2.0], np.zeros((3, 3))], ids=["none", "text", "short", "2d"]
)
def test_processor_that_returns_nonsense(either, result):
    with pytest.raises((TypeError, ValueError)):
        text(either, 3, logits_processor=[lambda ids, scores: result])
    assert len(text(either, 5)) == 5


def test_signal_in_mid_generation(either, off):
    """Ctrl-C as the kernel sends it, while a processor runs and between two tokens."""
    expected = text(off, 30)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    for at in range(1, 8):
        calls = []

        def processor(ids, scores, calls=calls, at=at):
            calls.append(1)
            if len(calls) == at:
                signal.raise_signal(signal.SIGINT)
            return scores

        either.reset()
        with pytest.raises(KeyboardInterrupt):
            text(either, 20, logits_processor=[processor])
        assert text(either, 30) == expected

        def consume(at=at):
            for i, _ in enumerate(either.generate(P, temp=0.0), start=1):
                if i == at:
                    signal.raise_signal(signal.SIGINT)

        with pytest.raises(KeyboardInterrupt):
            consume()
        assert text(either, 30) == expected


class Interrupter:
    """Raises KeyboardInterrupt at the n-th time that a line of draftwood/generation.py is about to run."""

    def __init__(self, at: tuple[int, int] | None = None) -> None:
        self.at = at
        self.hits: dict[int, int] = {}

    def __enter__(self):
        sys.settrace(self.trace)
        return self

    def __exit__(self, *error):
        sys.settrace(None)

    def trace(self, frame, event, arg):
        if frame.f_code.co_filename != generation_module.__file__:
            return None
        if event == "line":
            self.hits[frame.f_lineno] = self.hits.get(frame.f_lineno, 0) + 1
            if self.at == (frame.f_lineno, self.hits[frame.f_lineno]):
                sys.settrace(None)
                raise KeyboardInterrupt
        return self.trace


def test_interrupt_at_every_line(on, off):
    """Python delivers Ctrl-C between any two bytecodes: each line of generation.py, run 1 and 3."""
    tokens = text(off, 12)
    held, second = [*P, *tokens[:3]], [*P, *tokens[:3], 17]

    def requests():
        text(on, 4)
        text(on, 5, held)
        text(on, 5, second, logits_processor=[lambda ids, scores: scores])
        on.generate(second, temp=0.0).send(None)

    expected = fresh(off, 6, second)
    with Interrupter() as seen:
        requests()
    assert len(seen.hits) > 60
    for line, times in seen.hits.items():
        for nth in {1, min(times, 3)}:
            on.reset()
            with pytest.raises(KeyboardInterrupt), Interrupter((line, nth)):
                requests()
            assert text(on, 6, second) == expected, f"line {line}, run {nth}"
            assert text(on, 4) == tokens[:4], f"line {line}, run {nth}"


ENGINE_CALLS = ["row", "next", "propose", "verify", "trim", "commit", "eval", "rewind", "reset"]


@pytest.mark.parametrize("name", ENGINE_CALLS)
def test_interrupt_after_every_engine_call(on, off, name, monkeypatch):
    """The same inside engine.py: after the library has done its work, before generation.py hears of it."""
    held = [*P, *text(off, 3)]
    second = [*held, 17]
    expected, after = fresh(off, 12, second), fresh(off, 12)
    real = getattr(type(on._engine), name)
    for at in range(1, 9):
        calls = []

        def interrupted(self, *args, calls=calls, at=at, **kwargs):
            calls.append(1)
            result = real(self, *args, **kwargs)
            if len(calls) == at:
                raise KeyboardInterrupt
            return result

        on.reset()
        monkeypatch.setattr(type(on._engine), name, interrupted)
        try:
            text(on, 4)
            text(on, 5, held)
            text(on, 5, second)
        except KeyboardInterrupt:
            assert len(calls) == at
        finally:
            monkeypatch.setattr(type(on._engine), name, real)
        assert calls
        assert text(on, 12, second) == expected, f"call {at} of {name}"
        assert text(on, 12) == after, f"call {at} of {name}"


# --- processors, criteria, grammars ---------------------------------------------------------------------


def recorded(llm, n=40, **settings):
    calls, criteria = [], []

    def processor(ids, scores):
        calls.append((ids.tolist(), scores.copy(), llm.n_tokens))
        return scores

    def criterion(ids, scores):
        criteria.append((ids.tolist(), llm.n_tokens, scores.shape))
        return False

    tokens = text(
        llm, n, logits_processor=[processor], stopping_criteria=StoppingCriteriaList([criterion]), **settings
    )
    return tokens, calls, criteria


def test_processors_and_criteria_see_each_prefix_once(llama, on, off):
    stock = recorded(llama(**STOCK))
    for temp in (0.0, 0.8):
        a, b = recorded(on, temp=temp), recorded(off, temp=temp)
        assert a[0] == b[0]
        assert a[2] == b[2]
        assert [c[0] for c in a[1]] == [[*P, *a[0][:i]] for i in range(40)]
        for x, y in zip(a[1], b[1], strict=True):
            assert x[0] == y[0]
            assert x[2] == y[2]
            assert np.array_equal(x[1], y[1])
        on.reset()
        off.reset()
    # upstream's own loop: the same prefixes, counts and shapes
    assert [len(c[0]) for c in stock[1]] == [len(c[0]) for c in a[1]]
    assert [c[2] for c in stock[1]] == [c[2] for c in a[1]]
    assert [(len(ids), n, shape) for ids, n, shape in stock[2]] == [
        (len(ids), n, shape) for ids, n, shape in a[2]
    ]


def test_stateful_processor(on, off):
    """One that counts its calls and acts on the count, as outlines and guidance do."""

    def banning():
        banned = []

        def processor(ids, scores):
            banned.append(int(np.argmax(scores)) if len(banned) % 3 == 0 else -1)
            for token in banned:
                if token >= 0:
                    scores[token] = -np.inf
            return scores

        return [processor]

    assert text(on, 60, logits_processor=banning()) == text(off, 60, logits_processor=banning())
    assert fresh(on, 40, logits_processor=banning(), temp=0.9) == fresh(
        off, 40, logits_processor=banning(), temp=0.9
    )


@pytest.mark.parametrize("at", range(8))
def test_criterion_that_stops(either, off, at):
    expected = fresh(off, 30)
    seen = []

    def criterion(ids, scores):
        seen.append(ids.tolist())
        return len(seen) > at

    either.reset()
    tokens = list(either.generate(P, temp=0.0, stopping_criteria=StoppingCriteriaList([criterion])))
    assert tokens == expected[:at]
    assert either.n_tokens == len(P) + at
    assert text(either, 30) == expected


def test_criterion_that_raises(either, off):
    def criterion(ids, scores):
        if len(ids) > len(P) + 4:
            raise Boom
        return False

    got = []
    with pytest.raises(Boom):
        drain(either.generate(P, temp=0.0, stopping_criteria=StoppingCriteriaList([criterion])), got)
    expected = fresh(off, 30)
    assert got == expected[:5]
    assert text(either, 30) == expected


@pytest.mark.parametrize("temp", [0.0, 0.9])
@pytest.mark.parametrize(
    "rules", ["root ::= [a-e]+", 'root ::= ("abc" | "de" [0-9])+', 'root ::= "{" [a-z]+ ":" [0-9]+ "}" root']
)
def test_grammar(on, off, rules, temp):
    def run(llm):
        return fresh(llm, 40, grammar=LlamaGrammar.from_string(rules, verbose=False), temp=temp)

    tokens = run(off)
    assert run(on) == tokens
    written = off.detokenize(tokens).decode()
    assert set(written) <= set("abcdefghijklmnopqrstuvwxyz0123456789{}:")
    assert len(written) >= 20


def test_state_saved_within_a_processor(on, off):
    """n_tokens and the memory agree inside a callback too: a checkpoint taken there is worth something."""
    expected = text(off, 30)
    for at in range(1, 10):
        states = []

        def processor(ids, scores, states=states, at=at):
            if len(ids) == len(P) + at:
                states.append(on.save_state())
            return scores

        on.reset()
        assert text(on, 30, logits_processor=[processor]) == expected
        on.reset()
        on.load_state(states[0])
        assert on.n_tokens == len(P) + at
        assert text(on, 30 - at, [*P, *expected[:at]]) == expected[at:]


# --- scores, states, low level --------------------------------------------------------------------------


def test_scores_are_equal_bit_for_bit(llama):
    on, off = llama(speculation="mtp", logits_all=True), llama(speculation="off", logits_all=True)
    for n in (1, 2, 3, 4, 5, 6, 7, 30):
        assert fresh(on, n) == fresh(off, n)
        assert on.n_tokens == off.n_tokens
        assert np.array_equal(on._scores, off._scores), f"after {n} tokens"
        assert on.eval_logits == off.eval_logits


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 6, 7, 20])
def test_state_saved_and_loaded(on, off, k, llama):
    expected = text(off, 40)
    generator = on.generate(P, temp=0.0)
    got = list(itertools.islice(generator, k))
    state = on.save_state()
    assert state.n_tokens == len(P) + k - 1
    got += itertools.islice(generator, 40 - k)
    generator.close()
    assert got == expected, "saving in the middle changes nothing"
    on.load_state(state)
    assert on.n_tokens == len(P) + k - 1
    assert text(on, 40 - k, [*P, *expected[:k]]) == expected[k:]
    for other in (llama(speculation="off"), llama(speculation="mtp")):
        other.load_state(state)
        assert text(other, 40 - k, [*P, *expected[:k]]) == expected[k:]
        other.load_state(state)
        assert text(other, 20, P) == expected[:20]


def test_state_loaded_in_mid_generation(on, off):
    """The generator that was running goes on from the loaded state, as upstream's does."""
    seen = []
    for llm in (on, off):
        text(llm, 10)
        state = llm.save_state()
        generator = llm.generate([9, 8, 7], temp=0.0)
        got = list(itertools.islice(generator, 4))
        llm.load_state(state)
        got += itertools.islice(generator, 10)
        generator.close()
        seen.append((got, llm.n_tokens))
    assert seen[0] == seen[1]
    assert text(on, 30) == fresh(off, 30)


def test_cache(on, off):
    for llm in (on, off):
        llm.set_cache(LlamaRAMCache())
    for prompt in ("one two", "one two three", "one", "one two", "other"):
        a, b = (llm.create_completion(prompt, max_tokens=12, temperature=0.0) for llm in (on, off))
        assert a["choices"] == b["choices"]


def test_low_level_loop(on, off):
    """eval and sample by hand, as old programs do it."""

    def loop(llm, temp):
        llm.reset()
        llm._sampler = None
        llm.eval(P)
        tokens = []
        for _ in range(20):
            tokens.append(llm.sample(temp=temp))
            llm.eval([tokens[-1]])
        return tokens

    expected = fresh(off, 20)
    assert loop(off, 0.0) == expected
    assert loop(on, 0.0) == expected
    assert loop(on, 0.8) == loop(off, 0.8)


@pytest.mark.parametrize("k", range(1, 9))
def test_sample_after_a_generation(on, off, k):
    """Between two requests sample() looks at the row that the last token came from."""
    seen = []
    for llm in (on, off):
        text(llm, k)
        llm._sampler = None
        seen.append([llm.sample(temp=0.0), llm.n_tokens, llm.sample(temp=0.0, idx=llm.n_tokens - 1)])
    assert seen[0] == seen[1]
    assert seen[0][0] == text(off, k)[-1]


def test_eval_set_back_by_hand(on, off):
    """n_tokens is public: setting it back is exact or refused, never garbage."""
    tokens = text(off, 30)
    for k in (1, 2, 3, 4, 5, 9):
        for back in range(8):
            fresh(on, k)
            n = on.n_tokens - back
            on.n_tokens = n
            follow = [*P, *tokens][n : n + 3]
            try:
                on.eval(follow)
            except UnsupportedError:
                assert back > 0
                continue
            on._sampler = None
            assert on.sample(temp=0.0) == fresh(off, 1, [*P, *tokens][: n + 3])[0]


def test_raw_decode_in_mid_generation(on, off):
    """Somebody decodes on the bare context between two tokens: an exception in words, then exact again."""
    import ctypes

    for k in range(1, 8):
        generator = on.generate(P, temp=0.0)
        for _ in range(k):
            next(generator)
        array = (ctypes.c_int32 * 2)(5, 6)
        assert native.llama_decode(on.ctx, native.llama_batch_get_one(array, 2)) == 0
        with pytest.raises(UnsupportedError, match="expected it untouched"):
            next(generator)
        assert text(on, 20) == fresh(off, 20)


# --- the context's end ----------------------------------------------------------------------------------


def test_end_of_the_context(on, off, llama):
    def until_the_end(llm):
        llm.reset()
        tokens = []
        with pytest.raises(RuntimeError, match="llama_decode returned 1") as caught:
            drain(llm.generate(P, temp=0.0), tokens)
        return tokens, llm.n_tokens, str(caught.value), type(caught.value)

    a, b, stock = until_the_end(on), until_the_end(off), until_the_end(llama(**STOCK))
    assert a == b
    assert a[3] is ContextFullError
    assert len(a[0]) == len(stock[0]) == 256 - len(P) + 1
    assert a[1] == stock[1] == 256
    assert text(on, 20) == fresh(off, 20)


def test_prompt_longer_than_the_context(either):
    long = [1] * 300
    with pytest.raises(ContextFullError, match="context of 256 tokens"):
        text(either, 3, long)
    assert len(text(either, 5)) == 5
    with pytest.raises(ValueError, match="exceed context window"):
        either.create_completion("a b c d e f g h " * 60, max_tokens=4)


def test_completion_stops_at_the_context(on, off):
    results = [
        llm.create_completion("ab " * 60, max_tokens=None, temperature=0.0, stop=["\0\0\0"])
        for llm in (on, off)
    ]
    assert results[0]["choices"] == results[1]["choices"]
    assert results[0]["usage"] == results[1]["usage"]


# --- completions ----------------------------------------------------------------------------------------


def same(on, off, call):
    """The two results without what is new at each call."""
    a, b = call(on), call(off)
    for result in (a, b):
        for part in result if isinstance(result, list) else [result]:
            part.pop("id")
            part.pop("created")
            part.pop("timings", None)
    assert a == b
    return a


@pytest.mark.parametrize(
    "settings", [{"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 0.8, "seed": 3}], ids=str
)
def test_completion(on, off, settings):
    same(on, off, lambda llm: llm.create_completion("one two", max_tokens=40, **settings))
    same(on, off, lambda llm: llm("one two three", max_tokens=10, echo=True, **settings))
    chunks = same(
        on, off, lambda llm: list(llm.create_completion("one", max_tokens=30, stream=True, **settings))
    )
    assert len(chunks) > 5


def test_completion_stops_at_strings(on, off):
    whole = on.create_completion("one two", max_tokens=40, temperature=0.0)["choices"][0]["text"]
    stopped = 0
    for start in range(0, len(whole) - 3, 5):
        stop = whole[start : start + 3]
        result = same(
            on,
            off,
            lambda llm, stop=stop: llm.create_completion(
                "one two", max_tokens=40, temperature=0.0, stop=[stop]
            ),
        )
        stopped += result["choices"][0]["finish_reason"] == "stop"
    assert stopped > 2


def test_completion_with_bias_and_processor(on, off):
    same(
        on,
        off,
        lambda llm: llm.create_completion("ab", max_tokens=20, temperature=0.0, logit_bias={"100": 50.0}),
    )
    same(
        on,
        off,
        lambda llm: llm.create_completion("ab", max_tokens=20, repeat_penalty=1.3, frequency_penalty=0.5),
    )


def test_logprobs(llama):
    on, off = llama(speculation="mtp", logits_all=True), llama(speculation="off", logits_all=True)
    result = same(
        on, off, lambda llm: llm.create_completion("one two", max_tokens=30, temperature=0.0, logprobs=3)
    )
    assert len(result["choices"][0]["logprobs"]["tokens"]) > 5
    same(
        on,
        off,
        lambda llm: llm.create_completion("one", max_tokens=20, temperature=0.9, logprobs=2, echo=True),
    )
    same(
        on,
        off,
        lambda llm: list(
            llm.create_completion("one", max_tokens=20, temperature=0.0, logprobs=2, stream=True)
        ),
    )
    chat = [{"role": "user", "content": "hello"}]
    same(on, off, lambda llm: llm.create_chat_completion(chat, max_tokens=20, logprobs=True, top_logprobs=2))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_chat(on, off, temperature):
    settings = {"max_tokens": 30, "temperature": temperature}
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello there"}]
    answer = same(on, off, lambda llm: llm.create_chat_completion(messages, **settings))
    reply = answer["choices"][0]["message"]["content"]
    second = [*messages, {"role": "assistant", "content": reply}, {"role": "user", "content": "more"}]
    same(on, off, lambda llm: llm.create_chat_completion(second, **settings))
    same(on, off, lambda llm: list(llm.create_chat_completion(second, stream=True, **settings)))


def test_chat_in_json(on, off):
    messages = [{"role": "user", "content": "an object"}]
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    same(
        on,
        off,
        lambda llm: llm.create_chat_completion(
            messages,
            max_tokens=30,
            temperature=0.0,
            response_format={"type": "json_object", "schema": schema},
        ),
    )


# --- life cycle -----------------------------------------------------------------------------------------


def test_pickle(llama, off):
    llm = llama(speculation="mtp", draft_tokens=3, draft_p_min=0.25, exact=True)
    copy = pickle.loads(pickle.dumps(llm))
    assert (copy.speculation, copy._options) == ("mtp", llm._options)
    assert text(copy, 30) == text(off, 30)
    copy.close()
    plain = pickle.loads(pickle.dumps(off))
    assert plain.speculation == "off"
    plain.close()


def test_closing_twice(llama):
    llm = llama(speculation="mtp")
    llm.close()
    llm.close()
    assert llm.speculation_stats is None
    llm.reset_speculation_stats()


def test_use_after_close(python, gguf):
    """An exception, not the end of the process: upstream hands freed pointers to the library."""
    uses = (
        "next(llm.generate([1, 2, 3]))",
        "llm.eval([1, 2, 3])",
        "llm.sample()",
        "llm('one two', max_tokens=3)",
        "llm.create_chat_completion([{'role': 'user', 'content': 'hi'}], max_tokens=3)",
        "llm.tokenize(b'one two')",
        "llm.detokenize([1, 2, 3])",
        "llm.save_state()",
        "(llm.reset(), next(llm.generate([1, 2])))",
        "llm.n_ctx()",
        "llm.n_vocab()",
        "llm.token_eos()",
        "llm.ctx",
        "llm.model",
    )
    done = python(
        """
        import sys
        from draftwood import Llama
        llm = Llama(sys.argv[1], speculation="mtp", n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False)
        next(llm.generate([1, 2, 3]))
        llm.close()
        for use in sys.argv[2:]:
            try:
                eval(use)
            except Exception as error:
                print(type(error).__name__, use)
        """,
        gguf("planted-moe"),
        *uses,
    )
    assert done.returncode == 0, f"after {done.stdout!r}: {done.stderr[-500:]}"
    assert done.stdout.splitlines() == [f"ClosedError {use}" for use in uses]


def test_auto_picks_what_the_file_has(llama):
    assert llama("moe-mtp").speculation == "mtp"
    assert llama("moe-mtp").speculation_reason == ""
    plain = llama("moe-plain")
    assert plain.speculation == "off"
    assert "no MTP block" in plain.speculation_reason


def test_stock_kernels_also_draft(llama):
    """exact=False gives llama.cpp's fast kernels; every token is still the target's own sample."""
    fast = llama(speculation="mtp", exact=False)
    assert len(text(fast, 60)) == 60
    assert fast.speculation_stats.exact_batches == 0
    assert fast.speculation_stats.accepted > 0
    assert llama(**STOCK).speculation_stats is None


def test_two_objects_side_by_side(llama, off):
    expected = text(off, 40)
    a, b = llama(speculation="mtp"), llama(speculation="mtp", draft_tokens=2)
    streams = [a.generate(P, temp=0.0), b.generate(P, temp=0.0)]
    pairs = [(next(streams[0]), next(streams[1])) for _ in range(40)]
    assert [x for x, _ in pairs] == [y for _, y in pairs] == expected


def test_positions_that_an_image_skips(on, off, llama):
    """Multimodal handlers decode by themselves and set n_tokens past the cells they filled (M-RoPE)."""
    stock = llama(**STOCK)
    found = []
    for llm in (on, off, stock):
        llm.reset()
        llm.eval(P[:3])
        llm.n_tokens = 10
        llm.eval(P[3:5])
        assert llm.n_tokens == 12
        found.append(text(llm, 12, prompt=[], reset=False))
    assert found[0] == found[1]
    assert len(found[2]) == 12
