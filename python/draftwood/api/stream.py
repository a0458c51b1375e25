"""The chunks of a streamed completion: which bytes may go out, and when.

A chunk is a run of tokens that is whole UTF-8 and does not begin a stop string. With logprobs a chunk is one
token. Same chunks as upstream's, which joins and decodes the reply anew for every token.
Must not know: sampling, contexts beyond their scores. Tests: tests/model/test_api_completion.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from draftwood.api.detokenize import Growing, Pieces
from draftwood.api.logprobs import Offsets, of_token
from draftwood.generate.host import Host


class Chunks:
    """Emits the tokens of `reply` as chunks; `returned` of them have gone out."""

    def __init__(
        self,
        llm: Host,
        pieces: Pieces,
        head: dict[str, Any],
        request: dict[str, Any],
        reply: Growing,
        prompt_tokens: list[int],
        stops: list[bytes],
    ) -> None:
        self._llm, self._pieces, self._head, self._reply, self._stops = llm, pieces, head, reply, stops
        self._n_prompt = len(prompt_tokens)
        self._logprobs: int | None = request["logprobs"]
        self._offsets = Offsets(pieces, len(request["prompt"]))
        self._returned = 0
        self._stuck = False

    def ready(self) -> Iterator[dict[str, Any]]:
        """Yield what may go out now."""
        if self._stuck:
            return
        remaining = self._reply.tokens[self._returned :]
        whole = self._pieces.join(remaining)
        limit = len(whole) - self._begun_stop(whole)
        if self._logprobs is not None:
            yield from self._ready_tokens(remaining, limit)
            return
        position = 0
        while remaining:
            n, text, size = self._first_text(remaining)
            position += size
            if n == 0 or position > limit:
                return
            remaining = remaining[n:]
            self._returned += n
            yield self._chunk(text)

    def rest(self, finish: str, timings: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield what is left up to a stop string, and the last chunk, which is empty."""
        remaining = self._reply.tokens[self._returned :]
        whole = self._pieces.join(remaining)
        ends = [whole.index(stop) for stop in self._stops if stop in whole]
        end = min(ends, default=len(whole))
        position = 0
        for token in remaining:
            piece = self._pieces.join([token])
            position += len(piece)
            logprobs = None
            if self._logprobs is not None:
                if self._pieces.is_bos(token):
                    continue
                logprobs = self._of(token, self._offsets.bytes(self._reply.tokens, self._returned))
            if position >= end:
                piece = piece[: len(piece) - (position - end)]
            self._returned += 1
            yield self._chunk(piece.decode("utf-8", errors="ignore"), logprobs)
            if position >= end:
                break
        yield {**self._chunk("", None, finish), "timings": timings}

    def _ready_tokens(self, remaining: list[int], limit: int) -> Iterator[dict[str, Any]]:
        position = 0
        for token in remaining:
            if self._pieces.is_bos(token):
                continue
            piece = self._pieces.join([token])
            position += len(piece)
            if position > limit:
                return
            logprobs = self._of(token, self._offsets.characters(self._reply.tokens, self._returned))
            self._returned += 1
            yield self._chunk(piece.decode("utf-8", errors="ignore"), logprobs)

    def _of(self, token: int, offset: int) -> dict[str, Any]:
        assert self._logprobs is not None
        row = self._llm.scores[: self._llm.n_tokens][self._n_prompt + self._returned - 1]
        return of_token(self._pieces, token, row, self._logprobs, offset)

    def _first_text(self, tokens: list[int]) -> tuple[int, str, int]:
        """Return the shortest run that is whole UTF-8: tokens, text, bytes; no tokens if there is none."""
        lacks_end = False
        for n in range(1, len(tokens) + 1):
            data = self._pieces.join(tokens[:n])
            try:
                return n, data.decode("utf-8"), len(data)
            except UnicodeDecodeError as error:
                lacks_end = error.reason == "unexpected end of data"
                if not lacks_end:
                    break
        self._stuck = not lacks_end  # no longer run will be valid either: it waits for rest()
        return 0, "", 0

    def _begun_stop(self, text: bytes) -> int:
        """Return how many bytes at the end of `text` may begin a stop string."""
        longest = 0
        for stop in self._stops:
            for n in range(min(len(stop), len(text)), longest, -1):
                if text.endswith(stop[:n]):
                    longest = n
                    break
        return longest

    def _chunk(self, text: str, logprobs: Any = None, finish: str | None = None) -> dict[str, Any]:
        choice = {"text": text, "index": 0, "logprobs": logprobs, "finish_reason": finish}
        return {**self._head, "choices": [choice]}
