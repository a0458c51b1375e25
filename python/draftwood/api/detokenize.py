"""Bytes of tokens, asked from the library once each, and text that grows token by token.

Must not know: requests, stop strings, contexts. Tests: tests/model/test_api_detokenize.py,
tests/model/test_api_completion.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

from draftwood._llama_cpp import llama_cpp as _native
from draftwood.errors import IDS_HINT, ClosedError, OptionError

_FIRST_GUESS = 64  # bytes; nearly every token is shorter


class Pieces:
    """What each token of a vocabulary is in bytes; lives as long as its model.

    Upstream's `LlamaModel.detokenize` drops tokens of more than 32 bytes, ends the process on ids that are
    none, and asks the library for every token again.
    """

    def __init__(self, vocab: Any) -> None:
        self._vocab = vocab
        self._n_vocab = int(_native.llama_vocab_n_tokens(vocab))
        self._bos = int(_native.llama_vocab_bos(vocab))
        self._known: tuple[dict[int, bytes], dict[int, bytes]] = ({}, {})

    def piece(self, token: int, special: bool = False) -> bytes:
        """Return the bytes of `token`; of control tokens only with `special`, else none.

        Errors: OptionError for an id outside the vocabulary; ClosedError after `close`.
        """
        known = self._known[bool(special)]
        piece = known.get(token)
        if piece is None:
            piece = known[int(token)] = self._ask(int(token), special)
        return piece

    def join(self, tokens: Iterable[int], special: bool = False) -> bytes:
        """Return the bytes of `tokens`; a space right after a leading BOS belongs to the BOS."""
        tokens = list(tokens)
        joined = b"".join([self.piece(token, special) for token in tokens])
        return joined[1:] if tokens and tokens[0] == self._bos and joined[:1] == b" " else joined

    def is_bos(self, token: int) -> bool:
        """Tell whether `token` begins a text."""
        return token == self._bos

    def close(self) -> None:
        """Forget the vocabulary, which is about to be freed."""
        self._vocab = None
        self._known = ({}, {})

    def _ask(self, token: int, special: bool) -> bytes:
        if self._vocab is None:
            raise ClosedError(
                "found a tokenizer whose Llama was closed; expected an open one", hint="load the model again"
            )
        if not 0 <= token < self._n_vocab:
            raise OptionError(
                f"found token {token}; expected ids from 0 to {self._n_vocab - 1}", hint=IDS_HINT
            )
        size = _FIRST_GUESS
        while True:
            buffer = ctypes.create_string_buffer(size)
            n = int(_native.llama_token_to_piece(self._vocab, token, buffer, size, 0, special))
            if n >= 0:
                return buffer.raw[:n]
            size = -n  # what it needs


def token_text(vocab: Any, token: int) -> str:
    """Return a token as the vocabulary of the model file spells it."""
    return str(_native.llama_vocab_get_text(vocab, token).decode("utf-8"))


class Growing:
    """The bytes of a token list that grows at its end, kept as `Pieces.join` would give them."""

    def __init__(self, pieces: Pieces, tokens: Iterable[int] = ()) -> None:
        self._pieces = pieces
        self.tokens: list[int] = []
        self.data = bytearray()
        self._begins = True
        for token in tokens:
            self.push(token)

    def push(self, token: int) -> None:
        """Add a token."""
        self.tokens.append(token)
        piece = self._pieces.piece(token)
        if self._begins and piece:
            self._begins = False
            if piece[:1] == b" " and self._pieces.is_bos(self.tokens[0]):
                piece = piece[1:]
        self.data += piece
