"""Completions are upstream's own, byte for byte, for any reply, stop strings and arguments (hypothesis).

The reply is replayed in place of `generate`, so that invalid UTF-8, control tokens and endings occur that no
model would write. Upstream's method runs unbound on the same object; only `timings` is ours alone.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
from draftwood import Llama
from draftwood._llama_cpp import llama_cpp as native
from draftwood.errors import no_tokens
from draftwood.generate.generation import Base
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "models" / "tiny-moe" / "tiny-moe-f16.gguf"


class Replay(Llama):
    """Yields `reply` whatever the prompt; keeps upstream's contract of n_tokens, input_ids and criteria."""

    reply: list[int] = []
    closed = 0

    def generate(self, tokens, stopping_criteria=None, **sampling):
        if not tokens:
            raise no_tokens("none")
        self.input_ids[: len(tokens)] = tokens
        self.n_tokens = len(tokens)
        try:
            for token in self.reply:
                self.input_ids[self.n_tokens] = token
                if stopping_criteria is not None and stopping_criteria(self._input_ids, self._scores[0, :]):
                    return
                yield token
                self.n_tokens += 1
        finally:
            self.closed += 1


@pytest.fixture(scope="module", params=["tiny-moe", "random", "tiny-moe that adds BOS and EOS"])
def llm(request, gguf):
    path = gguf("moe-mtp") if request.param == "random" else str(TINY)
    threads = {"n_threads": 1, "n_threads_batch": 1}
    llm = Replay(path, n_ctx=192, speculation="off", exact=False, logits_all=True, verbose=False, **threads)
    llm.scores[:] = np.random.default_rng(0).standard_normal(llm.scores.shape)
    llm.scores[5] = 0.0  # all equal: ties
    with pytest.MonkeyPatch.context() as patch:
        for name in ("bos", "eos") if "adds" in request.param else ():
            patch.setattr(native, f"llama_vocab_get_add_{name}", lambda vocab: True)
        yield llm
    llm.close()


def results(method, llm, arguments):
    """What a method gives and says: an exception and warnings included."""
    out = []
    llm.set_seed(7)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            for part in method(llm, **arguments):
                out.append({k: v for k, v in part.items() if k not in ("id", "created", "timings")})
        except (ValueError, IndexError) as error:
            out.append((ValueError if isinstance(error, ValueError) else IndexError, str(error)[:30]))
            llm.set_seed(7)  # ours may refuse before it takes the request's
    return out, llm._seed, [str(one.message) for one in seen]


TEXT = st.text(alphabet=st.sampled_from("ab \n(<>|\0é€ß中😀"), max_size=24)
IDS = st.lists(
    st.one_of(
        st.integers(0, 379),
        st.sampled_from([0, 1, 2, 3, 11, 381, 382, 383]),
        st.sampled_from([195, 128, 240]),
    ),
    max_size=30,
)


@st.composite
def cases(draw):
    reply = draw(st.lists(st.one_of(TEXT, IDS), min_size=1, max_size=4))
    pieces = [part for part in reply if isinstance(part, str) and part]
    stop = st.one_of(
        TEXT, st.sampled_from(["a", "(", "<|", "é", ""]), *([st.sampled_from(pieces)] if pieces else [])
    )
    arguments = {
        "prompt": draw(st.one_of(st.just("one two"), TEXT, st.lists(st.integers(0, 379), max_size=6))),
        "max_tokens": draw(st.sampled_from([None, -1, 0, 1, 2, 3, 7, 16, 40, 1000])),
        "stop": draw(st.one_of(st.none(), stop, st.lists(stop, max_size=3))),
        "stream": draw(st.booleans()),
        "logprobs": draw(st.sampled_from([None, None, None, 0, 1, 3])),
        "suffix": draw(st.sampled_from([None, None, None, "", "end", " é"])),
        "seed": draw(st.sampled_from([None, 3])),
        "model": draw(st.sampled_from([None, "alias"])),
        "logit_bias": draw(st.sampled_from([None, {"5": 1.0}])),
    }
    if isinstance(arguments["prompt"], str):  # upstream adds a list to a str
        arguments["echo"] = draw(st.booleans())
    if draw(st.integers(0, 4)) == 0:
        last = draw(st.integers(0, 379))
        arguments["stopping_criteria"] = lambda ids, scores: ids[-1] == last
    return reply, arguments


def tokens_of(llm, reply):
    parts = [llm.tokenize(part.encode(), add_bos=False) if isinstance(part, str) else part for part in reply]
    return [token for part in parts for token in part]


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@example(case=([[195], "a b", [128, 195]], {"prompt": "one", "stream": True, "max_tokens": 40}))
@example(
    case=(["中中中", [240, 159, 152]], {"prompt": "one", "stream": True, "max_tokens": 3, "stop": ["中"]})
)
@example(case=([[240, 1, 1, 1, 1], "a"], {"prompt": "", "stream": True, "max_tokens": None}))
@example(case=(["(((a(b", [2]], {"prompt": "", "stream": True, "logprobs": 2, "max_tokens": 30}))
@example(case=([[5, 6]], {"prompt": "(((", "max_tokens": 5}))  # "(" is tiny-moe's BOS: two of them warn
@given(case=cases())
def test_completion_is_upstreams(llm, case):
    reply, arguments = case
    llm.reply = tokens_of(llm, reply)
    expected = results(Base._create_completion, llm, arguments)
    assert results(Replay._create_completion, llm, arguments) == expected


def test_a_stream_loses_characters_behind_invalid_utf8_as_upstreams_does(llm):
    """Behind bytes that are no UTF-8 tokens go out one by one, and what several spell together is lost."""
    half = llm.tokenize("é".encode(), add_bos=False)[:1]
    llm.reply = [*half, *tokens_of(llm, ["a", "中"])]
    asked = {"prompt": "one", "max_tokens": len(llm.reply)}
    for method in (Base._create_completion, Replay._create_completion):
        (whole,) = results(method, llm, {**asked, "stream": False})[0]
        stream = results(method, llm, {**asked, "stream": True})[0]
        assert whole["choices"][0]["text"] == "a中"
        assert "".join(part["choices"][0]["text"] for part in stream) == "a"


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=cases())
def test_results_are_json(llm, case):
    """Upstream hands out numpy floats as logprobs, which json refuses."""
    reply, arguments = case
    llm.reply = tokens_of(llm, reply)
    assert json.dumps(results(Replay._create_completion, llm, arguments)[0], default=lambda error: "error")


@pytest.mark.parametrize("taken", [1, 2, 5])
def test_a_stream_that_is_dropped_closes_the_generation(llm, taken):
    llm.reply = llm.tokenize(b"one two three four five six seven eight", add_bos=False)
    llm.closed = 0
    chunks = llm.create_completion("one", stream=True, max_tokens=40)
    for _ in range(taken):
        next(chunks)
    chunks.close()
    assert llm.closed == 1


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.0}, {"temperature": 0.9}, {"temperature": 0.9, "seed": 5}]
)
@pytest.mark.parametrize("stream", [False, True])
def test_generated_completion_is_upstreams(llama, sampling, stream):
    """The same with the model at work, and the seed of the next request."""
    llm = llama("planted-moe", speculation="mtp")
    for prompt in ("one two", [3, 4, 5]):
        arguments = {"prompt": prompt, "max_tokens": 40, "stream": stream, "stop": ["xq"], **sampling}
        got = results(Llama._create_completion, llm, arguments)
        assert got == results(Base._create_completion, llm, arguments)
        assert len(got[0]) > (5 if stream else 0)


def test_bias_and_processor_both_run(llama):
    """Upstream drops both if both are given."""
    llm = llama("planted-moe", speculation="mtp")
    for arguments in ({}, {"stream": True}):
        calls = []

        def processor(ids, scores, calls=calls):
            calls.append(len(ids))
            return scores

        out = llm.create_completion(
            "a",
            max_tokens=5,
            logits_processor=[processor],
            logit_bias={"7": 1000.0},
            temperature=0.0,
            **arguments,
        )
        text = "".join(part["choices"][0]["text"] for part in ([out] if not arguments else out))
        assert text == llm.detokenize([7] * 5).decode()
        assert len(calls) == 5


def test_echo_of_tokens(llm):
    """Upstream adds a list to a string."""
    llm.reply = [50, 51]
    prompt = llm.tokenize(b"one two", add_bos=False)
    assert llm.create_completion(prompt, echo=True)["choices"][0]["text"].startswith("one two")


def test_another_tokenizer_takes_upstreams_way(gguf):
    """Its text need not be a join of pieces."""

    class Shouting(Replay):
        def detokenize(self, tokens, prev_tokens=None, special=False):
            return super().detokenize(tokens, prev_tokens, special).upper()

    llm = Shouting(gguf("moe-mtp"), speculation="off", exact=False, n_ctx=64, verbose=False)
    llm.reply = [97, 98, 99]
    assert (
        llm.create_completion("a", max_tokens=3)["choices"][0]["text"]
        == llm.detokenize([97, 98, 99]).decode()
    )
    llm.close()
