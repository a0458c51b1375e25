"""Log-probabilities of a completion's tokens, in the shape of OpenAI's old completion API.

Rows of scores are f32[n_vocab] logits; row i belongs to position i. Values come out as Python floats, so
that a result is JSON as it is. Must not know: sampling, streams.
Tests: tests/model/test_api_completion.py (against upstream's own).
"""

from __future__ import annotations

import codecs
from typing import Any

import numpy as np

from draftwood._llama_cpp import llama as _upstream
from draftwood.api.detokenize import Growing, Pieces
from draftwood.generate.host import Host

_log_softmax: Any = _upstream.Llama.logits_to_logprobs


class Offsets:
    """How long the text before a token is, counted on as a reply grows."""

    def __init__(self, pieces: Pieces, start: int) -> None:
        self._text, self._start = Growing(pieces), start
        self._decoder = codecs.getincrementaldecoder("utf-8")("ignore")
        self._characters = 0

    def bytes(self, tokens: list[int], n: int) -> int:
        """Return `start` and the bytes of the first n tokens; n never shrinks."""
        self._advance(tokens, n)
        return self._start + len(self._text.data)

    def characters(self, tokens: list[int], n: int) -> int:
        """Return `start` and the characters of the first n tokens, bytes that are none left out."""
        self._advance(tokens, n)
        return self._start + self._characters

    def _advance(self, tokens: list[int], n: int) -> None:
        for token in tokens[len(self._text.tokens) : n]:
            known = len(self._text.data)
            self._text.push(token)
            self._characters += len(self._decoder.decode(self._text.data[known:]))


def of_token(pieces: Pieces, token: int, row: Any, top: int, offset: int) -> dict[str, Any]:
    """Return the log-probabilities of one streamed token; `row` are the logits it was sampled from."""
    logprobs = _log_softmax(row)
    written = _text(pieces, token)
    return {
        "tokens": [written],
        "text_offset": [offset],
        "token_logprobs": [float(logprobs[token])],
        "top_logprobs": [_top(pieces, logprobs, top, token, written)],
    }


def of_completion(
    llm: Host, pieces: Pieces, request: dict[str, Any], prompt_tokens: list[int], reply: list[int]
) -> dict[str, Any] | None:
    """Return the log-probabilities of a whole completion, with echo=True those of the prompt too.

    With echo, rows are paired with tokens as upstream pairs them: the prompt's BOS is left out, and the first
    row stands for the first token shown.
    """
    top = request["logprobs"]
    if top is None:
        return None
    tokens, first_row = reply, len(prompt_tokens) - 1
    if request["echo"]:
        tokens, first_row = [*prompt_tokens[pieces.is_bos(prompt_tokens[0]) :], *reply], 0
    offsets = Offsets(pieces, 0 if request["echo"] else len(request["prompt"]))
    out: dict[str, list[Any]] = {"tokens": [], "text_offset": [], "token_logprobs": [], "top_logprobs": []}
    rows = llm.scores[first_row : llm.n_tokens]
    for i, (token, row) in enumerate(zip(tokens, rows, strict=False)):
        if pieces.is_bos(token):
            continue
        written = _text(pieces, token)
        logprobs = _log_softmax(row)
        out["tokens"].append(written)
        out["text_offset"].append(offsets.characters(tokens, i))
        out["token_logprobs"].append(float(logprobs[token]))
        out["top_logprobs"].append(_top(pieces, logprobs, top, token, written))
    if request["echo"] and out["tokens"]:
        out["token_logprobs"][0] = out["top_logprobs"][0] = None  # nothing precedes the first token
    return out


def _text(pieces: Pieces, token: int) -> str:
    return pieces.join([token]).decode("utf-8", errors="ignore")


def _top(pieces: Pieces, logprobs: Any, top: int, token: int, written: str) -> dict[str, float]:
    """Return the `top` likeliest texts, ties by higher id first, and the token's own."""
    likeliest = {_text(pieces, i): float(logprobs[i]) for i in _largest(logprobs, top)}
    likeliest[written] = float(logprobs[token])
    return likeliest


def _largest(values: Any, count: int) -> list[int]:
    """Return the indices of the `count` largest values, largest first, of equal ones the last first."""
    n = len(range(len(values))[:count])  # what a slice makes of it
    if n == 0:
        return []
    candidates = np.flatnonzero(values >= np.partition(values, -n)[-n]).tolist()
    return sorted(candidates, key=lambda i: (values[i], i), reverse=True)[:n]
