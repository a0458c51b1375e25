"""What the caller gives to be called: logits processors, grammars and draft models, and what comes of them.

Processors and grammars run inside a C callback, which loses what they raise; it is kept here.
Must not know: contexts, rounds. Tests: tests/model/generate/test_processors.py, test_draft_model.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from draftwood.errors import GrammarError, OptionError

Processor = Callable[[Any, Any], Any]


class GuardedProcessors(list[Processor]):
    """The same processors, each wrapped: the first exception is kept, and raised by `raise_pending`.

    After it, logits pass through unchanged until then. Test: tests/model/generate/test_processors.py.
    """

    def __init__(self, processors: Iterable[Processor]) -> None:
        super().__init__(self._wrap(processor) for processor in processors)
        self._error: BaseException | None = None

    def _wrap(self, processor: Processor) -> Processor:
        def guarded(input_ids: Any, scores: Any) -> Any:
            if self._error is not None:
                return scores
            try:
                return _checked(processor(input_ids, scores), scores)
            except BaseException as error:  # Ctrl-C lands here too
                self._error = error
                return scores

        return guarded

    def keep(self, error: BaseException) -> None:
        """Keep an exception for `raise_pending`, unless there is one already."""
        self._error = self._error or error

    def raise_pending(self) -> None:
        """Raise what a processor raised since the last call, if anything."""
        error, self._error = self._error, None
        if error is not None:
            raise error


class WatchedGrammar:
    """A grammar that notices when it leaves no token: that is kept in `guard` as a GrammarError.

    Without it llama.cpp takes any token, or fails in its own words. Test: tests/model/test_api_bad_input.py.
    """

    def __init__(self, grammar: Any, guard: GuardedProcessors) -> None:
        self._grammar, self._root, self._guard = grammar._grammar, grammar._root, guard

    def check(self, candidates: Any) -> None:
        """Look at a llama_token_data_array right after the grammar in the sampler chain."""
        array = candidates.contents
        kind = np.dtype([("id", np.intc), ("logit", np.single), ("p", np.single)])
        raw = (ctypes.c_char * (array.size * kind.itemsize)).from_address(
            ctypes.addressof(array.data.contents)
        )
        if np.max(np.frombuffer(raw, kind)["logit"], initial=-np.inf) == -np.inf:
            self._guard.keep(
                GrammarError(
                    "found no token that the grammar allows here and the logits processors leave over",
                    hint="loosen the grammar or the processors; generation up to here was kept",
                )
            )


def _checked(result: Any, scores: Any) -> Any:
    if result is None or np.shape(result) != np.shape(scores):
        found = "None" if result is None else f"an array of shape {np.shape(result)}"
        raise OptionError(
            f"a logits processor returned {found}; expected scores of shape {np.shape(scores)}",
            hint="return scores at its end, changed or not",
        )
    return result


def given_draft(drafted: Any, most: int, n_vocab: int) -> list[int]:
    """Return the first `most` of the tokens that the caller's draft model gave; wrong ones cost time only.

    Errors: OptionError for what are no tokens.
    """
    try:
        draft = [int(token) for token in np.asarray(drafted).reshape(-1)[:most]]
    except (TypeError, ValueError, OverflowError):
        draft = [-1]
    if not all(0 <= token < n_vocab for token in draft):
        raise OptionError(
            f"found {drafted!r} from draft_model=; expected token ids, 0 to {n_vocab - 1}",
            hint="return an array of ids of this model, such as np.array([], dtype=np.intc) for none",
        )
    return draft
