"""A completion: the request made ready, the loop over `generate`, the result.

Gives what llama-cpp-python's `_create_completion` gives, byte for byte, in time linear in the reply: upstream
detokenises the whole reply for every token. Prompts are prompt.py's, chunks stream.py's, log-probabilities
logprobs.py's.
Must not know: drafting, chat. Tests: tests/model/test_api_completion.py (against upstream's own method).
"""

from __future__ import annotations

import math
import random
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from draftwood._llama_cpp import llama as _upstream
from draftwood._llama_cpp import llama_cpp as _native
from draftwood.api.detokenize import Growing, Pieces
from draftwood.api.logprobs import of_completion
from draftwood.api.prompt import checked_prompt, encodable_text, prompt_tokens, room_for_reply
from draftwood.api.stops import listed_stops
from draftwood.api.stream import Chunks
from draftwood.api.timings import Latest, Timer
from draftwood.errors import IDS_HINT, CacheError, OptionError, translated
from draftwood.generate.host import Host
from draftwood.load.arguments import checked_seed
from draftwood.load.fixes import CACHE_ERRORS

_SAMPLING = [
    *("top_k", "top_p", "min_p", "typical_p", "tfs_z", "mirostat_mode", "mirostat_tau", "mirostat_eta"),
    *("frequency_penalty", "presence_penalty", "repeat_penalty"),
    *("stopping_criteria", "logits_processor", "grammar"),
]


@dataclass(slots=True)
class _Run:
    """One request on its way."""

    llm: Host
    pieces: Pieces
    request: dict[str, Any]
    head: dict[str, Any]
    prompt_tokens: list[int]
    max_tokens: int
    stops: list[bytes]
    reply: Growing
    chunks: Chunks | None
    timer: Timer
    text: bytes = b""
    finish: str = "length"


def complete(llm: Host, pieces: Pieces, request: dict[str, Any], latest: Latest) -> Iterator[dict[str, Any]]:
    """Yield the completion, or with request["stream"] its chunks.

    `request` holds every argument of upstream's `_create_completion`, defaults included. The result has
    upstream's keys and `timings` (timings.py), which go to `latest` too. Errors: ValueError if the prompt
    does not fit or logprobs were asked of a model without logits_all; whatever `generate` raises.
    """
    run = _prepare(llm, pieces, request)
    latest.usage = partial(_usage, run)
    yield from _reply(run)
    criteria = request["stopping_criteria"]
    if criteria is not None and criteria(llm.input_ids[: llm.n_tokens], llm.scores[: llm.n_tokens][-1, :]):
        run.text, run.finish = bytes(run.reply.data), "stop"
    latest.timings = timings = run.timer.result()
    if llm.verbose:
        _native.llama_perf_context_print(llm.ctx)
    if run.chunks is not None:
        yield from run.chunks.rest(run.finish, timings)
    if llm.cache:
        _keep(llm, [*run.prompt_tokens, *run.reply.tokens])
    if run.chunks is None:
        yield _result(run, timings)


@encodable_text()
def _prepare(llm: Host, pieces: Pieces, request: dict[str, Any]) -> _Run:
    prompt = checked_prompt(request["prompt"])
    tokens = prompt_tokens(llm, prompt, request["suffix"])
    max_tokens = room_for_reply(llm, request, len(tokens))
    stops = [stop.encode("utf-8") for stop in listed_stops(request["stop"])]
    head = _head(llm, request["model"])
    # an empty prompt begins with BOS, which keeps a leading space out of the text
    reply = Growing(pieces, [] if len(prompt) > 0 else [llm.token_bos()])
    chunks = Chunks(llm, pieces, head, request, reply, tokens, stops) if request["stream"] else None
    if llm.verbose:
        _native.llama_perf_context_reset(llm.ctx)
    if llm.cache:
        _look_up(llm, tokens)
    llm.set_seed(_seed(request["seed"], llm._seed))
    timer = Timer(llm, len(tokens))
    return _Run(llm, pieces, request, head, tokens, max_tokens, stops, reply, chunks, timer)


def _reply(run: _Run) -> Iterator[dict[str, Any]]:
    """Generate the reply into `run`; yield the chunks that may go out on the way."""
    reply, chunks, vocab = run.reply, run.chunks, _native.llama_model_get_vocab(run.llm.model)
    watch = _Watch(reply, run.stops)
    sampling = {name: run.request[name] for name in _SAMPLING}
    for token in run.llm.generate(run.prompt_tokens, temp=run.request["temperature"], **sampling):
        run.timer.tick()
        if _native.llama_vocab_is_eog(vocab, token):
            run.text, run.finish = bytes(reply.data), "stop"
            return
        reply.push(token)
        if watch.waits():
            continue
        cut = watch.stop()
        if cut is not None:
            run.text, run.finish = bytes(reply.data[:cut]), "stop"
            return
        if chunks is not None:
            yield from chunks.ready()
        if len(reply.tokens) >= run.max_tokens:
            run.text = bytes(reply.data)
            return


def _head(llm: Host, model: str | None) -> dict[str, Any]:
    return {
        "id": f"cmpl-{uuid.uuid4()}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model if model is not None else llm.model_path,
    }


def _seed(given: Any, of_llm: int) -> int:
    return random.Random(of_llm).randint(0, 2**32) if given is None else checked_seed(given)


def with_bias(request: dict[str, Any], n_vocab: int) -> Any:
    """Return the request's processors, its logit_bias last (upstream drops all if both are given).

    Errors: OptionError for a bias of what is no token, or that is no number.
    """
    processors = request["logits_processor"]
    if request["logit_bias"] is None:
        return processors
    bias = _checked_bias(request["logit_bias"], n_vocab)

    def add_bias(input_ids: Any, scores: Any) -> Any:
        biased = np.copy(scores)
        for token, value in bias.items():
            biased[token] = value + scores[token]
        return biased

    return _upstream.LogitsProcessorList([*(processors or []), add_bias])


def _checked_bias(given: Any, n_vocab: int) -> dict[int, float]:
    hint = f"logit_bias={{token: -100.0}}; {IDS_HINT}"
    try:
        bias = {int(token): float(value) for token, value in given.items()}
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise OptionError(
            f"found logit_bias={given!r:.80}; expected a dict of token ids and numbers: {error}", hint=hint
        ) from None
    for token, value in bias.items():
        if not 0 <= token < n_vocab:
            raise OptionError(
                f"found token {token} in logit_bias; expected 0 to {n_vocab - 1}",
                hint=hint,
            )
        if math.isnan(value):
            raise OptionError(
                f"found {value} as the logit_bias of token {token}; expected a number", hint=hint
            )
    return bias


def _look_up(llm: Host, prompt_tokens: list[int]) -> None:
    """Load the cached state that shares more of the prompt than the context does."""
    try:
        with _cache_errors("the prompt's state could not be read from the cache"):
            item = llm.cache[prompt_tokens]
    except KeyError:
        if llm.verbose:
            print("Llama._create_completion: cache miss", file=sys.stderr)
        return
    cached = llm.longest_token_prefix(item.input_ids.tolist(), prompt_tokens)
    held = llm.longest_token_prefix(llm.input_ids[: llm.n_tokens].tolist(), prompt_tokens)
    if cached > held:
        llm.load_state(item)
        if llm.verbose:
            print("Llama._create_completion: cache hit", file=sys.stderr)


def _keep(llm: Host, tokens: list[int]) -> None:
    if llm.verbose:
        print("Llama._create_completion: cache save", file=sys.stderr)
    with _cache_errors("the reply was generated, but its state could not be written to the cache"):
        llm.cache[tokens] = llm.save_state()


def _cache_errors(found: str) -> AbstractContextManager[None]:
    """Raise CacheError for a cache that fails; a state that it does not have is a KeyError as before."""
    hint = "make room or mend the cache's folder; set_cache(None) works without one"
    return translated(CACHE_ERRORS, lambda error: CacheError(f"{found}: {error}", hint=hint))


def _result(run: _Run, timings: dict[str, Any]) -> dict[str, Any]:
    text = run.text.decode("utf-8", errors="ignore")
    prompt, tokens = run.request["prompt"], run.reply.tokens
    if run.request["echo"]:
        text = (
            prompt if isinstance(prompt, str) else run.pieces.join(prompt).decode("utf-8", "ignore")
        ) + text
    logprobs = of_completion(run.llm, run.pieces, run.request, run.prompt_tokens, tokens)
    choice = {"text": text, "index": 0, "logprobs": logprobs, "finish_reason": run.finish}
    return {
        **run.head,
        "choices": [choice],
        "usage": _usage(run),
        "timings": timings,
    }


def _usage(run: _Run) -> dict[str, int]:
    n_prompt, n_reply = len(run.prompt_tokens), len(run.reply.tokens)
    return {"prompt_tokens": n_prompt, "completion_tokens": n_reply, "total_tokens": n_prompt + n_reply}


def _missing(char: int, seen: int) -> int:
    """Bytes that a UTF-8 sequence beginning with `char` still lacks when `seen` of it are there."""
    lengths = [length for length, lead in ((2, 0xC0), (3, 0xE0), (4, 0xF0)) if char & lead == lead]
    return max([length - seen for length in lengths if length > seen], default=0)


_MISSING = [[_missing(char, seen) for char in range(256)] for seen in range(4)]


class _Watch:
    """Looks at the end of a growing reply: is a character incomplete, is a stop string there?"""

    def __init__(self, reply: Growing, stops: list[bytes]) -> None:
        self._reply, self._stops = reply, stops
        self._wait = 0
        self._looked = 0  # bytes that held no stop string

    def waits(self) -> bool:
        """Tell whether this token is passed over, as upstream counts it: one token a missing byte."""
        for i, char in enumerate(self._reply.data[-3:]):
            lacks = _MISSING[3 - i][char]
            if lacks:
                self._wait = lacks
        if self._wait > 0:
            self._wait -= 1
            return True
        return False

    def stop(self) -> int | None:
        """Return where the reply is to be cut: at the caller's first stop string that it holds."""
        data, looked = self._reply.data, self._looked
        for stop in self._stops:
            found = data.find(stop, max(0, looked - len(stop) + 1) if stop else 0)
            if found >= 0:
                return found
        self._looked = len(data)
        return None
