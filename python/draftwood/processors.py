"""Run a request's logits processors from inside a C callback without losing what they raise."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from draftwood.errors import OptionError

Processor = Callable[[Any, Any], Any]


class GuardedProcessors(list[Processor]):
    """The same processors, each wrapped: the first exception is kept, and raised by `raise_pending`.

    After it, logits pass through unchanged until then. Test: tests/model/test_generate.py.
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

    def raise_pending(self) -> None:
        """Raise what a processor raised since the last call, if anything."""
        error, self._error = self._error, None
        if error is not None:
            raise error


def _checked(result: Any, scores: Any) -> Any:
    if result is None or np.shape(result) != np.shape(scores):
        found = "None" if result is None else f"an array of shape {np.shape(result)}"
        raise OptionError(f"a logits processor returned {found}; expected scores of shape {np.shape(scores)}")
    return result
